"""What a check says."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "bad"]
_ORDER: tuple[Verdict, ...] = ("ok", "warn", "bad")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's outcome. `why` says what hangs on it, `mend` what to do (empty if nothing is to be done)."""

    name: str
    verdict: Verdict
    value: str
    why: str
    mend: str = ""


def worst(findings: Iterable[Finding]) -> Verdict:
    """The gravest verdict."""
    return max((finding.verdict for finding in findings), key=_ORDER.index, default="ok")
