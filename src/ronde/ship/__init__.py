"""Ship a trained model: an export that is refused when it is wrong, signed, and run without torch.

Offers :func:`export_onnx` and :func:`check_export`, :func:`write_bundle` and :func:`verify_bundle`,
:class:`ShippedModel`, and :func:`serve_model`. Verifying and running import no torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ronde.world import lazily

# ONNX Runtime 1.32 reports to its maker from its import on, and leaves a file behind.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from ronde.ship.bundle import Bundle, ShipError, make_key, verify_bundle, write_bundle
    from ronde.ship.captures import Capture, watch_captures
    from ronde.ship.export import export_onnx
    from ronde.ship.floor import Floor, check_export
    from ronde.ship.installs import current_bundle, install_bundle, restore_previous
    from ronde.ship.runtime import ShippedModel
    from ronde.ship.server import serve_model

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.ship.bundle": "Bundle ShipError make_key verify_bundle write_bundle",
            "ronde.ship.captures": "Capture watch_captures",
            "ronde.ship.installs": "current_bundle install_bundle restore_previous",
            "ronde.ship.export": "export_onnx",
            "ronde.ship.floor": "Floor check_export",
            "ronde.ship.runtime": "ShippedModel",
            "ronde.ship.server": "serve_model",
        },
    )
