"""``ronde ship``: an export that is refused when it is wrong, signed, verified, and served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ronde.cli.hosts import HostfileOption, HostOptions, Places, PythonOption, SshConfigOption
from ronde.cli.options import GroupWithDefault, RunsOption, option
from ronde.cli.saved_run import answer_of, start_of
from ronde.cli.script import JsonOption, write_json
from ronde.cli.show import find_run
from ronde.watch import plain_console
from ronde.world import ArgumentError
from ronde.world.units import format_bytes

_EXAMPLES = """
The script is started up to ronde.distribute, the run's newest checkpoint is loaded, and the model
exported. The export is compared with the model's float64 twin, sample by sample, and refused if
it is further away than eight times the model's own rounding.

Examples:

```sh
ronde ship gpt-1 --out bundle                              ONNX, checked on training samples
ronde ship gpt-1 --check test.npz --int8 --max-drop 0.5 --sign key.pem --out bundle
ronde ship gpt-1 --to torch --out bundle                   or --to safetensors
ronde ship key key.pem public.pem
ronde ship verify bundle --key public.pem                  no torch needed
ronde ship run bundle --port 8080
ronde ship install bundle --key public.pem --to /srv/model --hosts edge1,edge2
```

Exit status: 0 shipped, 1 refused because the export is wrong, 2 an argument cannot be used.
"""

KeyOption = Annotated[
    Path | None, option("--key", "Public key that must have signed it.", metavar="FILE")
]
HostsOption = Annotated[
    str | None, option("--hosts", "On these hosts, over ssh. DIR is a folder there.", "a,b")
]
BundleArgument = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder of a bundle.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    group = typer.Typer(
        cls=GroupWithDefault,
        help="Export a run's model, verify it, and serve it.\n" + _EXAMPLES,
        rich_markup_mode="markdown",
    )
    app.add_typer(group, name="ship")

    @group.command(
        "export", help="Export a run's model, and refuse an export that is wrong.\n" + _EXAMPLES
    )
    def ship(
        run: Annotated[
            str | None, typer.Argument(metavar="[RUN]", help="Default: the last.")
        ] = None,
        folder: RunsOption = Path("runs"),
        to: Annotated[
            str, option("--to", "onnx, torch, or safetensors.", metavar="FORMAT")
        ] = "onnx",
        out: Annotated[Path, option("--out", "The bundle's folder.", metavar="DIR")] = Path(
            "bundle"
        ),
        check: Annotated[
            Path | None,
            option("--check", "Samples: .npz with input, target, slice.", metavar="FILE"),
        ] = None,
        int8: Annotated[bool, option("--int8", "Add a model in 8 bits, if it is as good.")] = False,
        max_drop: Annotated[
            float, option("--max-drop", "Points of accuracy that int8 may lose.", metavar="POINTS")
        ] = 0.5,
        sign: Annotated[
            Path | None, option("--sign", "Private key of ronde ship key.", metavar="FILE")
        ] = None,
        serial: Annotated[
            int, option("--serial", "Number of the bundle; older ones are refused.", metavar="N")
        ] = 1,
        json_file: JsonOption = None,
    ) -> None:
        if to not in ("onnx", "torch", "safetensors"):
            raise ArgumentError(f"--to {to}: expected onnx, torch, or safetensors.")
        if int8 and to != "onnx":
            raise ArgumentError("--int8 is for --to onnx.")
        if out.exists():
            raise ArgumentError(f"{out} is there already: give --out another name.")
        directory = find_run(folder, run)
        checkpoint, command, facts = start_of(directory)
        options = {
            "checkpoint": str(checkpoint),
            "to": to,
            "out": str(out.absolute()),
            "check": str(check.absolute()) if check else None,
            "int8": int8,
            "max_drop": max_drop / 100,
            "sign": str(sign.absolute()) if sign else None,
            "serial": serial,
            "facts": facts,
        }
        values = answer_of("ship", command, options, "exported")
        # A refusal is written, too: it has the numbers that decided.
        if json_file:
            write_json(json_file, values)
        if values.get("argument"):
            raise ArgumentError(values["refused"])
        if "refused" in values:
            plain_console(stderr=True).print(f"refused: {values['refused']}", soft_wrap=True)
            raise typer.Exit(1)
        _show(values, out)

    @group.command("key", help="Make a pair of Ed25519 keys for ronde ship --sign.")
    def key(
        private: Annotated[Path, typer.Argument(metavar="PRIVATE", help="New private key.")],
        public: Annotated[Path, typer.Argument(metavar="PUBLIC", help="New public key.")],
    ) -> None:
        from ronde.ship import make_key

        make_key(private, public)
        print(f"keys      {private} (keep it secret), {public}")

    @group.command(
        "verify",
        help="Check a bundle's signature and digests, and run its stored samples on this device.",
    )
    def verify(bundle: BundleArgument, key: KeyOption = None) -> None:
        from ronde.ship import ShippedModel, verify_bundle

        verified = verify_bundle(bundle, key)
        who = f"signed by {key}" if verified.signed else "digests only: no --key was given"
        print(f"bundle    serial {verified.serial}, {len(verified.about['files'])} files, {who}")
        if "model.onnx" in verified.about["files"]:
            worst = ShippedModel(bundle, key).check()
            print(f"samples   off by {worst:.2g} at most on this device, within the limit")

    @group.command("run", help="Serve a bundle's model: POST /predict, GET /health.")
    def serve(
        bundle: BundleArgument,
        key: KeyOption = None,
        port: Annotated[int, option("--port", "0: any free one.", metavar="N")] = 8080,
        host: Annotated[str, option("--host", "Address to bind.", metavar="ADDRESS")] = "127.0.0.1",
        int8: Annotated[bool, option("--int8", "The model in 8 bits.")] = False,
        capture: Annotated[
            Path | None, option("--capture", "Append requests to this file.", metavar="FILE")
        ] = None,
        sample: Annotated[
            float, option("--sample", "Share of the requests to capture.", metavar="SHARE")
        ] = 0.01,
    ) -> None:
        from ronde.ship import Capture, ShippedModel, serve_model

        model = ShippedModel(bundle, key, int8=int8)
        kept = Capture(capture, sample) if capture else None
        with serve_model(model, port, host, kept) as server:
            where = f"http://{host}:{server.server_address[1]}"
            print(f"serving   {where}/predict, serial {model.bundle.serial}", flush=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                print("stopped by SIGINT")

    @group.command("install", help="Verify a bundle, and make it the current one of a folder.")
    def install(
        bundle: BundleArgument,
        key: Annotated[Path, option("--key", "Public key that must have signed it.", "FILE")],
        root: Annotated[Path, option("--to", "Folder of installed bundles.", "DIR")],
        hosts: HostsOption = None,
        hostfile: HostfileOption = None,
        ssh_config: SshConfigOption = None,
        python: PythonOption = None,
    ) -> None:
        from ronde.ship import install_bundle, verify_bundle

        places = HostOptions(hosts, hostfile, ssh_config=ssh_config, python=python).places()
        if places:
            # Here first: no host gets a bundle that none would take.
            verify_bundle(bundle, key)
            _on_hosts(places, root, bundle, key)
        else:
            done = install_bundle(bundle, root, key)
            print(f"installed serial {done.serial}: {root / 'current'}")

    @group.command("rollback", help="Make the bundle before the current one current again.")
    def rollback(
        root: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of installed bundles.")],
        hosts: HostsOption = None,
        hostfile: HostfileOption = None,
        ssh_config: SshConfigOption = None,
        python: PythonOption = None,
    ) -> None:
        from ronde.ship import restore_previous

        places = HostOptions(hosts, hostfile, ssh_config=ssh_config, python=python).places()
        if places:
            _on_hosts(places, root)
        else:
            print(f"current   serial {restore_previous(root)}: {root / 'current'}")

    @group.command("watch", help="Compare captured requests with the samples of a bundle.")
    def watch(
        captures: Annotated[Path, typer.Argument(metavar="FILE", help="Of ronde ship run.")],
        against: Annotated[Path, option("--against", "The bundle.", "BUNDLE")],
        key: KeyOption = None,
        json_file: JsonOption = None,
    ) -> None:
        from ronde.ship import verify_bundle, watch_captures

        if not captures.is_file():
            raise ArgumentError(f"{captures} is not there: ronde ship run --capture writes it.")
        with captures.open() as lines:
            values = watch_captures(verify_bundle(against, key), lines)
        if json_file:
            write_json(json_file, values)
        seconds = values["seconds"]
        serials = ", ".join(f"{s} ({n})" for s, n in values["serials"].items())
        print(
            f"captures  {values['requests']:,} requests, {values['rows']:,} rows, serial {serials}"
        )
        print(f"latency   median {seconds['median']:.2g} s, p99 {seconds['p99']:.2g} s")
        if values["unreadable"]:
            print(f"left out  {values['unreadable']} lines that cannot be read")
        shifted = [c for c in values["columns"] if c["shifted"]]
        for c in shifted:
            missing = f", {c['missing']:.1%} not finite" if c["missing"] else ""
            print(f"drift     {c['column']}: stability index {c['index']:.2f}{missing}")
        if not shifted:
            print(f"drift     none seen in {len(values['columns'])} columns")
        if shifted:
            raise typer.Exit(1)


def _on_hosts(
    places: Places, root: Path, bundle: Path | None = None, key: Path | None = None
) -> None:
    from ronde.cli.ship_hosts import order_hosts

    if not order_hosts(places, root, bundle, key):
        raise typer.Exit(1)


def _show(values: dict[str, Any], out: Path) -> None:
    about = values["about"]
    console = plain_console()
    for i, floor in enumerate(about.get("floor", ())):
        name = "equal" if i == 0 else ""
        console.print(
            f"{name:9} output {i}: worst |export - float64| {floor['export']:.2g}; the model's own "
            f"rounding {floor['model']:.2g}, limit {floor['limit']:.2g}",
            soft_wrap=True,
        )
    checked = about["checked"]
    if "floor" in about:
        console.print(f"checked   {checked['samples']} samples of {checked['on']}", soft_wrap=True)
    if small := values.get("int8"):
        before, after = small["accuracy"]
        text = (
            f"accuracy {before:.1%} -> {after:.1%}; worst {small['worst'][0]}: "
            f"{small['worst'][1]:.1f} points; {small['speedup']:.2f}x as fast"
        )
        console.print(f"int8      {small['refused'] or text}", soft_wrap=True)
    signed = "signed" if values["signed"] else "not signed"
    files = ", ".join(f"{n} ({format_bytes(f['bytes'])})" for n, f in about["files"].items())
    console.print(f"bundle    {out}, serial {about['serial']}, {signed}: {files}", soft_wrap=True)
