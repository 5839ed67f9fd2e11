"""What counts as a link."""

import pytest

from kvstore_client import BadRequest
from kvstore_client.links import make_links


def test_each_endpoint_is_a_link() -> None:
    assert [(link.endpoint, link.local) for link in make_links(["a:1", "b:2"])] == [("a:1", ""), ("b:2", "")]


def test_each_local_address_is_a_link_to_the_one_endpoint() -> None:
    assert [(link.endpoint, link.local) for link in make_links("a:1", ["10.0.0.1", "10.0.1.1"])] == [
        ("a:1", "10.0.0.1"),
        ("a:1", "10.0.1.1"),
    ]


def test_as_many_of_both_are_pairs() -> None:
    pairs = make_links(["a:1", "b:1"], ["10.0.0.1", "10.0.1.1"])
    assert [(link.endpoint, link.local) for link in pairs] == [("a:1", "10.0.0.1"), ("b:1", "10.0.1.1")]


@pytest.mark.parametrize(
    ("endpoints", "local", "why"),
    [
        ([], [], "no endpoint"),
        (["a:1", "b:1"], ["10.0.0.1", "10.0.1.1", "10.0.2.1"], "2 endpoints and 3 local"),
        (["a:1", "a:1"], [], "given twice"),
        (["a:1", "unix:/x"], [], "Unix socket"),
        (["unix:/x"], ["10.0.0.1"], "Unix socket"),
        (["a"], [], "neither HOST:PORT"),
    ],
)
def test_what_can_not_be_links_is_refused(endpoints: list[str], local: list[str], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        make_links(endpoints, local)


def test_a_link_is_shown_by_what_went_over_it() -> None:
    assert repr(make_links("a:1", ["10.0.0.1"])[0]) == (
        "Link(endpoint='a:1', local='10.0.0.1', fetched_bytes=0, put_bytes=0, stripes=0, given_up=0, losses=0, trouble='')"
    )
