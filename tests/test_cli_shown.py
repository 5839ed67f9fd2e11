"""What the commands show people."""

import pytest
from rich.table import Table

from kvstore.cli.common import table_console


def test_a_name_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name")
    table.add_row("team:smile:v1")
    table_console().print(table)
    assert "team:smile:v1" in capsys.readouterr().out
