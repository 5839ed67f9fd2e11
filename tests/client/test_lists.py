"""What an error says of a list of pages that travels in pieces."""

import pytest

from kvstore.api.wire import NoSpace
from kvstore_client.lists import HowFar, Piece


def piece(first: int, last: int) -> Piece:
    return Piece(first, last, 0, -1, [], b"")


def go_through(pieces: list[Piece], fails: int, error: NoSpace) -> None:
    with HowFar() as far:
        for number, _ in enumerate(far.through(pieces)):
            if number == fails:
                raise error


@pytest.mark.parametrize(
    ("cut", "fails", "daemon_says", "done", "words"),
    [
        ([(0, 256), (256, 300)], 1, 3, 259, r"full \(about pages 256 to 299 of the list, .*: the first 259 of the list are done\)"),
        ([(0, 256), (256, 300)], 0, 0, 0, r"full \(about pages 0 to 255 of the list, .*: none are done\)"),
        ([(0, 200)], 0, 7, 7, r"full \(the first 7 of the list are done\)"),
        ([(0, 200)], 0, 0, 0, "full"),
    ],
)
def test_what_the_daemon_has_done_of_a_piece_counts(
    cut: list[tuple[int, int]], fails: int, daemon_says: int, done: int, words: str
) -> None:  # fmt: skip
    with pytest.raises(NoSpace, match=f"^{words}$") as caught:
        go_through([piece(*ends) for ends in cut], fails, NoSpace("full").after(daemon_says))
    assert caught.value.done_pages == done
