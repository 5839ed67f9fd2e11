"""`kvstore ns`: namespaces."""

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from kvstore.cli.common import (
    DEFAULT_HTTP,
    DEFAULT_TIMEOUT_S,
    HttpOption,
    JsonOption,
    PositionOption,
    PrefillOption,
    TimeoutOption,
    counted,
    http_json,
    of_several_tenants,
    print_json,
    table_console,
)  # fmt: skip
from kvstore.cli.components import HELP, component_of
from kvstore.errors import BadRequest
from kvstore.kvspec import DTYPE_BYTES, Component, KVSpec
from kvstore.size_text import size_text

app = typer.Typer(help="Create, list, show and drop namespaces.", no_args_is_help=True, add_completion=False)


@app.command("list")
def list_namespaces(http: HttpOption = DEFAULT_HTTP, timeout: TimeoutOption = DEFAULT_TIMEOUT_S, as_json: JsonOption = False) -> None:
    """List the namespaces of the token's tenant; with admin access those of all, each with its tenant."""
    stat = http_json(http, "/v1/stat", timeout=timeout)
    items = stat["namespaces"]
    if as_json:
        print_json(items)
        return
    tenants = of_several_tenants(stat)
    table = Table(*(["tenant"] if tenants else []), "name", "id", "pages", "in DRAM", "page tokens", "page bytes", "recipes")
    for item in items:
        spec = KVSpec.from_dict(item["spec"])
        table.add_row(
            *([item["tenant"]] if tenants else []), item["name"], item["id"], f"{item['pages']:,}", size_text(item["dram_bytes"]),
            str(spec.page_tokens), size_text(spec.page_bytes), "on" if item["recipes"] else "off",
        )  # fmt: skip
    table_console().print(table if items else "no namespaces yet; create one with `kvstore ns create`")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="A name, unique among yours.")],
    layers: Annotated[int | None, typer.Option(help="Layers with attention over all tokens: the first component, of kind full.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Elements a head.")] = None,
    component: Annotated[list[str] | None, typer.Option(help=HELP)] = None,
    model: Annotated[str, typer.Option(help="MODEL@REVISION, the revision a commit hash or version.")] = "",
    model_folder: Annotated[Path | None, typer.Option(help="Compute the model fingerprint from this folder instead.")] = None,
    fingerprint: Annotated[str, typer.Option(help="Give the model fingerprint itself instead.")] = "",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPE_BYTES)}.")] = "bf16",
    planes: Annotated[int, typer.Option(help="2 for keys and values, 1 for a compressed latent.")] = 2,
    page_tokens: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    hash_bytes: Annotated[
        int,
        typer.Option(
            help="Pages are labelled with digests of so many bytes (16, 20, 24, 28 or 32) that the engine gives, not with token ids."
        ),
    ] = 0,
    flat: Annotated[bool, typer.Option("--flat", help="With --hash-bytes: the digests form no chains, each page stands alone.")] = False,
    recipes: Annotated[bool, typer.Option("--recipes", help="Allow token ids on disk, so that pages can be rebuilt.")] = False,
    retention: Annotated[int, typer.Option(help="Seconds that durable pages are kept at least.")] = 86_400,
    ttl: Annotated[int, typer.Option(help="Seconds without use after which pages are removed; 0 for never.")] = 0,
    prefill_us: PrefillOption = 0.0,
    prefill_ns_per_position: PositionOption = 0.0,
    rebuild: Annotated[
        str, typer.Option(help="What counts as the same page when it is computed again: exact, tolerant or never.")
    ] = "exact",
    lossy: Annotated[bool, typer.Option("--lossy", help="Pages may be discarded before their recipes are durable.")] = False,
    http: HttpOption = DEFAULT_HTTP,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Create a namespace, or show it if it is there already."""
    if flat and not hash_bytes:
        raise BadRequest("--flat is for pages that are labelled with digests: give --hash-bytes, too")
    shape: dict[str, int | str | None] = {"kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype, "planes": planes}
    spec = KVSpec(page_tokens, _components(layers, shape, component or []), hash_bytes=hash_bytes, flat=flat)
    body = {
        "name": name,
        "fingerprint": _fingerprint(model, model_folder, fingerprint, dtype),
        "spec": spec.to_dict(),
        "recipes": recipes,
        "retention_s": retention,
        "ttl_s": ttl,
        "prefill_us": prefill_us,
        "prefill_ns_per_position": prefill_ns_per_position,
        "rebuild": rebuild,
        "lossy": lossy,
    }
    made = http_json(http, "/v1/namespaces", method="POST", body=body, timeout=timeout)
    if as_json:
        print_json(made)
    else:
        typer.echo(f"{made['name']} is {made['id']}: pages of {spec.page_tokens} tokens, {size_text(spec.page_bytes)} each")
        for each in spec.components if len(spec.components) > 1 else ():
            typer.echo(f"  {_component(each)}")


def _components(layers: int | None, shape: dict[str, int | str | None], others: list[str]) -> tuple[Component, ...]:
    """Those of the options; the full one of `--layers` is the first."""
    if layers is None and not others:
        raise BadRequest("say what a page holds: --layers, --kv-heads and --head-dim; or --component, for each kind of state (see --help)")
    first = [] if layers is None else [_full(layers, shape)]
    return (*first, *(component_of(text, shape) for text in others))


def _full(layers: int, shape: dict[str, int | str | None]) -> Component:
    for name in ("kv_heads", "head_dim"):
        if shape[name] is None:
            raise BadRequest(f"--layers goes with --kv-heads and --head-dim: there is no --{name.replace('_', '-')}")
    return Component("full", layers, **shape)  # type: ignore[arg-type]


def _fingerprint(model: str, folder: Path | None, fingerprint: str, dtype: str) -> str:
    if sum((bool(model), folder is not None, bool(fingerprint))) != 1:
        raise BadRequest("say which weights the bytes depend on: one of --model NAME@REVISION, --model-folder or --fingerprint")
    if fingerprint:
        return fingerprint
    from kvstore_client.fingerprint import fingerprint_folder, fingerprint_revision

    if folder is not None:
        return fingerprint_folder(folder, settings={"kv_dtype": dtype})
    name, at, revision = model.rpartition("@")
    if not at:
        raise BadRequest(f"--model is NAME@REVISION, not {model!r}: a name alone does not fix the weights")
    return fingerprint_revision(name, revision, settings={"kv_dtype": dtype})


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name or id.")],
    http: HttpOption = DEFAULT_HTTP,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Describe a namespace."""
    info = http_json(http, f"/v1/namespaces/{quote(name, safe='')}", timeout=timeout)
    if as_json:
        print_json(info)
        return
    table = Table(show_header=False)
    for key, value in info.items():
        for name, text in _rows(key, value):
            table.add_row(name.replace("_", " "), text)
    table_console().print(table)


def _rows(key: str, value: Any) -> list[tuple[str, str]]:
    """A field of a namespace for people: one row, or one for each thing in it."""
    if key == "spec":
        spec = KVSpec.from_dict(value)
        plain = [(name, str(each)) for name, each in value.items() if name != "components"]
        return [("page_bytes", size_text(spec.page_bytes)), *plain, *(("component", _component(each)) for each in spec.components)]
    if key == "memory_bytes":
        return [(f"memory_of_{name}", size_text(nbytes)) for name, nbytes in value.items()]
    if isinstance(value, bool):
        return [(key, "yes" if value else "no")]
    return [(key, size_text(value) if key.endswith("_bytes") else str(value))]


def _component(of: Component) -> str:
    window = f" over {counted(of.window, 'token')}" if of.window else ""
    heads = f"{counted(of.kv_heads, 'KV head')} of {of.head_dim} {of.dtype}"
    return f"{of.kind}{window}: {counted(of.layers, 'layer')}, {heads}, {counted(of.planes, 'plane')}"


@app.command()
def drop(
    name: Annotated[str, typer.Argument(help="Name or id.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    http: HttpOption = DEFAULT_HTTP,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Forget a namespace and everything in it; its space comes back at once."""
    info = http_json(http, f"/v1/namespaces/{quote(name, safe='')}", timeout=timeout)
    if not yes:
        typer.confirm(f"Drop {info['name']} ({info['id']}) with {counted(info['pages'], 'page')}?", abort=True)
    http_json(http, f"/v1/namespaces/{info['id']}", method="DELETE", timeout=timeout)
    if as_json:
        print_json({"dropped": info["id"], "name": info["name"], "pages": info["pages"]})
    else:
        typer.echo(f"dropped {info['name']}")
