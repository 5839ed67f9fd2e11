"""Counters of the store, in one place: the metrics page and `status` read them, nothing else does."""

from dataclasses import dataclass

from kvstore.errors import Busy, NoSpace


@dataclass(slots=True)
class Stats:
    """Totals since start. Bytes are payload bytes unless the name says stored. `refused_pages` were not worth writing to SSD.

    The `near` ones are what clients said that they copied out of shared memory.
    """

    matches: int = 0
    matched_tokens: int = 0
    asked_tokens: int = 0
    puts: int = 0
    put_pages: int = 0
    put_bytes: int = 0
    put_exists_pages: int = 0
    puts_aborted: int = 0
    puts_busy: int = 0
    puts_no_space: int = 0
    copied_put_bytes: int = 0
    shared_segments: int = 0
    fetches: int = 0
    fetch_bytes: int = 0
    fetch_misses: int = 0
    near_fetches: int = 0
    near_fetch_bytes: int = 0
    demoted_pages: int = 0
    demoted_stored_bytes: int = 0
    promoted_blobs: int = 0
    promoted_stored_bytes: int = 0
    read_ahead_blobs: int = 0
    moved_blobs: int = 0
    moved_stored_bytes: int = 0
    evicted_dram_pages: int = 0
    evicted_ssd_pages: int = 0
    dropped_pages: int = 0
    refused_pages: int = 0
    dropped_parts: int = 0
    useless_parts: int = 0
    kept_units: int = 0
    text_pages: int = 0
    recipes_written: int = 0
    recipes_evicted: int = 0
    recipes_expired: int = 0
    rebuild_jobs: int = 0
    rebuilt_pages: int = 0
    rebuild_new_versions: int = 0
    rebuild_failed_attempts: int = 0
    rebuild_failed_jobs: int = 0
    corrupt_blobs: int = 0
    corrupt_records: int = 0
    dedup_blobs: int = 0
    compactions: int = 0
    abandoned_pages: int = 0
    expired_pages: int = 0
    recorded_requests: int = 0
    unrecorded_requests: int = 0
    group_commits: int = 0
    ssd_errors: int = 0
    scrubbed_blobs: int = 0
    scrubbed_stored_bytes: int = 0
    scrub_repaired: int = 0
    scrub_unreadable: int = 0
    event_batches: int = 0
    event_replays: int = 0

    def count_refusal(self, error: BaseException) -> None:
        """A put was refused."""
        self.puts_busy += isinstance(error, Busy)
        self.puts_no_space += isinstance(error, NoSpace)

    @property
    def written_per_hit_byte(self) -> float:
        """Bytes written to SSD for each byte of a hit that came from there; 0 as long as none did."""
        return self.demoted_stored_bytes / self.promoted_stored_bytes if self.promoted_stored_bytes else 0.0
