"""The reuse classifier: which pages are worth their place, learned online from their own hits and from ghosts that come back.

What a request says of its pages becomes a score (will they be used again within the horizon?), the score and the conversation's rhythm a
class, and the class and the time since the last use a value (see `kvstore.tiers.reuse`). The least value goes first. Where the estimates
do worse than leaf-LRU, leaf-LRU is followed. Costs nothing to train and needs no hint; docs/classifier.md has the model and its limits.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.columns import ColumnSpec, nth_least, nth_least_of_many
from kvstore.tiers.policies.policy import Columns, Explanation, Pages, Policy, Slots, Use, Values, gather, parts
from kvstore.tiers.reuse.admission import Admission
from kvstore.tiers.reuse.ages import RHYTHMS, SCORES, AgeTables
from kvstore.tiers.reuse.features import (
    Field,
    field,
    gap_octaves,
    hint_code,
    lone_codes,
    number_in,
    octave,
    page_codes,
    request_code,
    rhythm_octave,
    rhythm_octaves,
)
from kvstore.tiers.reuse.rival import Rival
from kvstore.tiers.reuse.runs import by_runs
from kvstore.tiers.reuse.score import Score
from kvstore.tiers.reuse.states import ABANDONED, IN, KNOWN, OFFERED, REFUSED, SHADOW, WAITS, KnownRuns, known_runs

_HORIZON = 2.0
"""How far ahead the score looks, in ages at which LRU would evict now."""
_REBUILD, _REBUILD_LEAST = 0.2, 500
"""The tables are made anew after page uses of so many capacities, and at least so many."""
_TABLE_HALF_LIFE, _STEP_HALF_LIFE = 8.0, 16.0
"""In uses of as many pages as are known."""
_SSD_WINDOW = 6
"""In uses of so many capacities: what of the past counts for the budget of admission."""
_MOST = 255


class Classifier(Policy):
    """For DRAM of `capacity` pages.

    `ssd_loss` is the share of all pages looked up that may be missed for the sake of fewer writes to SSD; None: all that leaves is written.
    """

    columns = (
        ColumnSpec("last", "f8"), ColumnSpec("code", "u8"), ColumnSpec("rhythm", "f4"), ColumnSpec("uses", "u1"),
        ColumnSpec("turns", "u1"), ColumnSpec("class", "u1"), ColumnSpec("state", "u1"),
        ColumnSpec("odds", "u1"),
    )  # fmt: skip
    counts_children = True

    def __init__(self, capacity: int, ssd_loss: float | None = None) -> None:
        self._capacity = capacity
        self._admission = None if ssd_loss is None else Admission(ssd_loss)
        self._ssd_age = 0.0
        """How old pages get on SSD; 0 as long as none had to leave it."""
        self._score = Score()
        self._tables = AgeTables()
        self._rival = Rival()
        self._lru_age = 1e9
        self._ssd_horizon = 0.0
        self._start: float | None = None
        self._since = 0
        self._floor = 0.0
        self._gave_up = False
        """Whether any page was ever abandoned."""

    @property
    def horizon_s(self) -> float:
        """How far ahead the score looks."""
        return _HORIZON * self._lru_age

    @property
    def follows_lru(self) -> bool:
        """Whether its estimates do worse than LRU of late."""
        return self._rival.follow_lru

    def resize(self, pages: int) -> None:
        """Take the capacity from what the tier holds."""
        self._capacity = pages

    # --- learning ------------------------------------------------------------------------------------------------------

    def used(self, columns: Columns, use: Use) -> None:
        """Learn from the pages that come back, and note what the request says of all."""
        now = use.now
        if self._start is None:
            self._start = now
        code = hint_code(use.hints)
        if code:
            self._score.look_at_hints()
            if self._admission is not None:
                self._admission.look_at_hints()
        if use.apart:
            self._used_apart(columns, use, code)
            return
        slots, counted = use.slots.astype(np.intp), use.counted  # numpy takes half the time for indices of its own type
        state = columns["state"].take(slots)
        if not counted:
            self._rival.played(state[: use.known])
        if counted >= len(slots):
            return
        if self._admission is not None:
            self._admission.looked_up(len(slots) - counted, max(_REBUILD_LEAST, _SSD_WINDOW * self._capacity))
        mine, back = slots[counted:], slots[counted : use.known]
        turn, rhythm, was_end, base_uses, request_gap = self._conversation(columns, use)
        octaves, uses = np.empty(0, np.int64), np.ones(len(mine), np.uint8)
        if len(back):
            gaps = np.maximum(now - columns["last"].take(back), 0.0)
            octaves = by_runs(gap_octaves, gaps)
            uses[: len(back)] += np.minimum(columns["uses"].take(back), _MOST - 1)
        count = max(use.pages, len(slots))
        rhythm_bin = rhythm_octave(rhythm) if use.known else 0
        shared = request_code(
            {
                Field.NEW_PAGES: octave(count - use.known), Field.KNOWN_PAGES: octave(use.known), Field.PAGES: octave(count),
                Field.REQUEST_GAP: int(octaves[-1]) if len(back) else request_gap, Field.TURNS: octave(turn, 7),
                Field.WAS_END: was_end, Field.RHYTHM: rhythm_bin, Field.HINT: code,
            }
        )  # fmt: skip
        codes = page_codes(
            uses=uses, gaps=octaves, first=counted, known=use.known, end=count, children=use.children[counted:],
            base_uses=base_uses, shared=shared,
        )  # fmt: skip
        odds = self._learn(columns, back, gaps, state[counted : use.known], codes) if len(back) else self._score.of(codes)
        score = _score_bins(odds)
        score += np.uint8(min(RHYTHMS - 1, rhythm_bin // 2) * SCORES)
        columns["code"][mine], columns["class"][mine], columns["uses"][mine] = codes, score, uses
        columns["last"][mine], columns["turns"][mine], columns["rhythm"][mine] = now, turn, rhythm
        columns["state"][mine] = state[counted:] & IN | (KNOWN | WAITS | SHADOW)
        self._since += len(mine)

    def _used_apart(self, columns: Columns, use: Use, hint: int) -> None:
        """As `used`, of pages that are each a conversation of their own. They are one request for the duel and the score."""
        slots, known, now = use.slots.astype(np.intp), use.known, use.now
        back = slots[:known]
        state, uses = columns["state"].take(slots), columns["uses"]
        self._rival.played_apart(state[:known])
        if self._admission is not None:
            self._admission.looked_up(len(slots), max(_REBUILD_LEAST, _SSD_WINDOW * self._capacity))
        gaps = np.maximum(now - columns["last"].take(back), 0.0)
        turns, rhythm, pause = columns["turns"].take(back).astype(np.int64), np.zeros(len(slots)), np.log2(gaps + 0.125)
        rhythm[:known] = np.where(turns > 0, 0.7 * columns["rhythm"].take(back).astype(np.float64) + 0.3 * pause, pause)
        turns, before = np.minimum(turns + 1, _MOST), columns["code"].take(back)
        base_uses, rhythm_bins = uses.take(back).astype(np.int64), np.zeros(len(slots), np.int64)
        rhythm_bins[:known] = rhythm_octaves(rhythm[:known])
        uses[back] = np.minimum(uses.take(back), _MOST - 1) + 1
        uses[slots[known:]] = 1
        codes = lone_codes(
            uses=uses.take(slots), gaps=gap_octaves(gaps), children=use.children, turns=turns, was_end=field(before, Field.FROM_END),
            base_uses=base_uses, rhythms=rhythm_bins[:known], hint=hint,
        )  # fmt: skip
        odds = self._learn(columns, back, gaps, state[:known], codes)
        columns["code"][slots] = codes
        columns["class"][slots] = _score_bins(odds) + (np.minimum(RHYTHMS - 1, rhythm_bins // 2) * SCORES).astype(np.uint8)
        columns["last"][slots], columns["rhythm"][slots] = now, rhythm
        columns["turns"][back], columns["turns"][slots[known:]] = turns, 0
        columns["state"][slots] = state & IN | (KNOWN | WAITS | SHADOW)
        self._since += len(slots)

    def entered(self, columns: Columns, slots: Slots, now: float) -> None:
        """They are in the tier."""
        columns["state"][slots] |= IN

    def left(self, columns: Columns, slots: Slots, now: float) -> None:
        """They are not in the tier any more."""
        columns["state"][slots] &= ~np.uint8(IN)

    def _learn(
        self,
        columns: Columns,
        back: npt.NDArray[np.intp],
        gaps: npt.NDArray[np.float64],
        state: npt.NDArray[np.uint8],
        codes: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.float64]:
        """Pages are used again, after so many seconds. Returns the log-odds of pages with these codes from then on."""
        before = columns["code"].take(back)
        self._tables.reused(columns["class"].take(back), gaps)
        if self._admission is not None and self._ssd_horizon:
            offered = (state & (OFFERED | IN)) == OFFERED
            if offered.any():
                refused = (state[offered] & REFUSED) != 0
                in_time = gaps[offered] <= self._ssd_horizon
                self._admission.came_back(before[offered], columns["odds"].take(back[offered]), refused, in_time)
        waits = (state & WAITS) != 0
        return self._score.learn_and_rate(before[waits], gaps[waits] <= self.horizon_s, codes)

    def _conversation(self, columns: Columns, use: Use) -> tuple[int, float, int, int, int]:
        """(turns, smoothed gap, where its end was, uses, last gap) of the conversation that the deepest known page tells of."""
        if not use.known:
            return 0, 0.0, 0, 0, 0
        deepest = int(use.slots[use.known - 1])
        turns, rhythm, code = columns["turns"].item(deepest), columns["rhythm"].item(deepest), columns["code"].item(deepest)
        if use.known <= use.counted:  # the read of this request has found it out
            was_end, base_uses, gap = (number_in(code, which) for which in (Field.WAS_END, Field.BASE_USES, Field.REQUEST_GAP))
            return turns, rhythm, was_end, base_uses % 8, gap
        pause = math.log2(max(0.0, use.now - columns["last"].item(deepest)) + 0.125)
        rhythm = 0.7 * rhythm + 0.3 * pause if turns else pause
        base_uses = octave(columns["uses"].item(deepest), 7)
        return min(_MOST, turns + 1), rhythm, number_in(code, Field.FROM_END), base_uses, 0

    def abandoned(self, columns: Columns, slots: Slots, now: float) -> None:
        """They are the first to go, unless they are used after all."""
        self._gave_up = True
        columns["state"][slots] |= ABANDONED

    def forgotten(self, columns: Columns, slots: Slots, now: float) -> None:
        """They were not used up to now."""
        state = columns["state"][slots]
        known = (state & KNOWN) != 0
        self._tables.lost(columns["class"][slots[known]], now - columns["last"][slots[known]])
        self._score.learn(columns["code"][slots[known & ((state & WAITS) != 0)]], used_again=False)
        self._learn_absence(columns, slots[(state & (OFFERED | REFUSED)) == OFFERED])  # of refused ones nobody knows
        columns["state"][slots] = 0

    # --- deciding ------------------------------------------------------------------------------------------------------

    def values(self, batch: Sequence[Pages], wanted: int, now: float) -> Values:
        """Reuses a second of keeping each page, or its recency as long as LRU does better."""
        if self._since >= max(_REBUILD_LEAST, _REBUILD * self._capacity):
            self._rebuild(batch, now)
        self._rival.keep_up(batch, self._capacity, lambda held: self._worth(held, now))
        if self.follows_lru:
            return gather(batch, "recency")
        values = self._worth(batch, now)
        if 0 < wanted <= len(values):
            self._floor = float(nth_least(values, wanted - 1))
        return values

    def _worth(self, batch: Sequence[Pages], now: float) -> npt.NDArray[np.float64]:
        values = self._tables.worth(gather(batch, "class"), now - gather(batch, "last"))
        if self._gave_up:
            values[(gather(batch, "state") & ABANDONED) != 0] = -1.0
        return values

    def _rebuild(self, batch: Sequence[Pages], now: float) -> None:
        """Look at all that is known: who was not used within the horizon, and which ages there are."""
        known = [known_runs(pages) for pages in batch]
        for runs in known:
            late = runs.slots(((runs.state & WAITS) != 0) & (now - runs.last > self.horizon_s))
            self._score.learn(runs.columns["code"].take(late), used_again=False)
            runs.columns["state"][late] &= ~np.uint8(WAITS)
        classes, last, pages = (
            np.concatenate(each) for each in zip(*((runs.classes, runs.last, runs.lengths) for runs in known), strict=True)
        )
        ages = now - last
        self._tables.rebuild(classes, ages, pages)
        rounds = self._since / max(1, int(pages.sum()))
        self._tables.forget(float(np.exp2(-rounds / _TABLE_HALF_LIFE)))
        self._score.forget(float(np.exp2(-rounds / _STEP_HALF_LIFE)))
        if self._admission is not None:
            self._admission.forget(float(np.exp2(-rounds / _STEP_HALF_LIFE)))
        self._since = 0
        self._lru_age = self._age_at_end(ages, pages, now)
        self._see_absence(known, now)

    def _see_absence(self, known: Sequence[KnownRuns], now: float) -> None:
        """Which pages that left for SSD were not used for as long as it would have held them."""
        horizon = self._ssd_horizon = self._ssd_age or self._provisional_horizon(now)
        if self._admission is None or not horizon:
            return
        for runs in known:
            late = runs.slots(((runs.state & OFFERED) != 0) & (now - runs.last > horizon))
            self._learn_absence(runs.columns, late)
            runs.columns["state"][late] &= ~np.uint8(OFFERED)

    def _provisional_horizon(self, now: float) -> float:
        """While SSD fills up: something that it will certainly hold, if that is well beyond what DRAM does."""
        so_far = (now - (self._start or now)) / 2
        return so_far if so_far > _HORIZON * self._lru_age else 0.0

    def _learn_absence(self, columns: Columns, slots: Slots | npt.NDArray[np.intp]) -> None:
        if self._admission is not None and self._ssd_horizon and len(slots):
            refused = (columns["state"][slots] & REFUSED) != 0
            self._admission.stayed_away(columns["code"][slots], columns["odds"][slots], refused, columns["last"][slots])

    def _age_at_end(self, ages: npt.NDArray[np.float64], pages: npt.NDArray[np.int64], now: float) -> float:
        """The age at which LRU evicts, if there are so many pages of each of these ages."""
        full = pages.sum() >= self._capacity
        return max(1e-3, float(nth_least_of_many(ages, pages, self._capacity - 1)) if full else now - (self._start or 0.0))

    def left_below(self, columns: Columns, slots: Slots, now: float) -> None:
        """Pages left SSD: the old among them had to, others may have been deleted."""
        slots = slots[(columns["state"][slots] & KNOWN) != 0]
        if len(slots):
            oldest = float((now - columns["last"][slots]).max())
            kept = (0.9 if oldest > self._ssd_age else 0.998) ** len(slots)
            self._ssd_age = max(1e-3, oldest + (self._ssd_age - oldest) * kept if self._ssd_age else oldest)

    def admits(self, batch: Sequence[Pages], now: float) -> npt.NDArray[np.bool_]:
        """Which pages that leave are worth writing to SSD. All, as long as it has room."""
        if self._admission is None:
            return super().admits(batch, now)
        odds = self._admission.odds(gather(batch, "code"))
        admitted = np.ones(len(odds), np.bool_)
        if self._ssd_age:
            admitted = self._admission.admits(odds, self._tables.chance_of_any(self._ssd_age, self._ssd_age))
        for pages, part in parts(batch):
            state = pages.of("state") & ~np.uint8(OFFERED | REFUSED)
            offered = np.where((state & KNOWN) != 0, np.where(admitted[part], np.uint8(OFFERED), np.uint8(OFFERED | REFUSED)), np.uint8(0))
            pages.columns["state"][pages.slots] = state | offered
            pages.columns["odds"][pages.slots] = odds[part]
            admitted[part] |= offered == 0  # nothing is known of it
        return admitted

    def admitted_after_all(self, columns: Columns, slots: Slots) -> None:
        """Pages were written though they would not have been by themselves: others need them."""
        columns["state"][slots] &= ~np.uint8(REFUSED)

    def chance(self, columns: Columns, slots: Slots, now: float, within: float) -> npt.NDArray[np.float64]:
        """The chance that pages are used within so many seconds from now."""
        return self._tables.chance(columns["class"][slots], now - columns["last"][slots], within)

    def peek(self, pages: Pages, now: float) -> Values:
        """As `values`, with the estimates as they are."""
        return pages.of("recency") if self.follows_lru else self._worth([pages], now)

    def explain(self, pages: Pages, now: float) -> list[Explanation]:
        """What is made of each page, and of what."""
        columns, slots = pages.columns, pages.slots
        codes = columns["code"][slots]
        admission = self._admission
        on_ssd = [None] * len(slots) if admission is None else admission.chances(admission.odds(codes)).tolist()
        ssd_floor = admission.floor_chance if admission is not None and self._ssd_age else 0.0
        gaps, depths, children = (field(codes, which) for which in (Field.GAP, Field.DEPTH, Field.CHILDREN))
        return [
            Explanation(
                idle_s=now - float(columns["last"][slot]), uses=int(columns["uses"][slot]), turns=int(columns["turns"][slot]),
                gap_s=float(2.0 ** (gap - 3.5)) if gap else 0.0, rhythm_s=float(2.0 ** float(columns["rhythm"][slot])),
                depth_pages=_least_of(depth), children=_least_of(kids % 8), abandoned=bool(columns["state"][slot] & ABANDONED),
                score=float(1 / (1 + np.exp(-score))), horizon_s=self.horizon_s, chance=float(chance), value=float(value),
                floor=self._floor, follows="lru" if self.follows_lru else "estimates", ssd_chance=ssd, ssd_floor=ssd_floor,
            )
            for slot, gap, depth, kids, score, chance, value, ssd in zip(
                slots.tolist(), gaps.tolist(), depths.tolist(), children.tolist(), self._score.of(codes).tolist(),
                self.chance(columns, slots, now, self._lru_age).tolist(), self._worth([pages], now).tolist(), on_ssd, strict=True,
            )
        ]  # fmt: skip


def _score_bins(odds: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """The bins of log-odds."""
    found: npt.NDArray[np.uint8] = np.minimum(np.maximum(odds * 2 + SCORES / 2, 0), SCORES - 1).astype(np.uint8)
    return found


def _least_of(octave_bin: int) -> int:
    """The least count in an octave."""
    return octave_bin if octave_bin < 3 else 2 ** (octave_bin - 2) + 1
