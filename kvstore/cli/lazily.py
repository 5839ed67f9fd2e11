"""A group whose commands are imported when they are needed: most need little, and `kvstore status` is not to load the store for it."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from kvstore.cli.imports import imports


class LazyGroup(TyperGroup):
    """Commands by name, each a function, or an app of its own, in a module of `kvstore.cli`. Subclasses fill `places`."""

    places: dict[str, tuple[str, str]] = {}  # noqa: RUF012 - filled once, by a subclass
    """The module and the name in it, by command."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._loaded: dict[str, Any] = {}
        self.commands = dict.fromkeys(self.places)  # type: ignore[assignment]  # names alone, for help and for "did you mean"

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, imported now if it was not yet. None if there is none of this name."""
        if cmd_name not in self.places:
            return None
        if cmd_name not in self._loaded:
            module, name = self.places[cmd_name]
            with imports():
                found = getattr(import_module(f"kvstore.cli.{module}"), name)
            if not isinstance(found, typer.Typer):
                alone = typer.Typer(add_completion=False)
                alone.command(cmd_name)(found)
                found = alone
            self._loaded[cmd_name] = typer.main.get_command(found)
            self._loaded[cmd_name].name = cmd_name
        return self._loaded[cmd_name]
