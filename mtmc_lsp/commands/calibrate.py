"""``mtmc calibrate``: measure this machine's GPU, so that plans use its own numbers."""

from __future__ import annotations

from mtmc_lsp.commands.options import AsJson, Python


def calibrate(
    python: Python = "",
    as_json: AsJson = False,
) -> int:
    """Measure this machine's GPU in under a minute and compare it with its data file; later plans use the result."""
    from mtmc_lsp.app.calibrate import calibrate as calibrated
    from mtmc_lsp.report.calibration import rows, show_calibration
    from mtmc_lsp.report.console import LiveLine, console, live
    from mtmc_lsp.report.documents import document

    with live(console(stderr=True), LiveLine(stage="measuring the GPU")):
        result = calibrated(python)
    if as_json:
        print(
            document(
                environment=result.environment,
                device=result.measured,
                data=result.data,
                table=rows(result.data, result.measured),
                stored=result.is_stored,
            )
        )
    else:
        show_calibration(console(), result)
    return 0
