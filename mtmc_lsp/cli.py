"""The entry point of ``mtmc``: runs a command and turns errors into messages and exit codes.

Every command prints its result on standard output (one JSON document with ``--json``) and its progress on standard error.
Exit codes: 0 success, 1 a negative result, 2 the request is wrong, 3 the environment lacks something.
"""

from __future__ import annotations

import sys

import typer

from mtmc_lsp.commands.app import app
from mtmc_lsp.core.errors import MtmcError, RequestError
from mtmc_lsp.report.encoding import prepare_streams

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells define it."""


def main() -> None:
    """Run the command that the command line names, and exit."""
    arguments = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv
    as_json = "--json" in arguments
    prepare_streams()
    try:
        code = app(standalone_mode=False)
    except MtmcError as error:
        code = _report_error(error, as_json)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted; finished steps are stored: continue with --resume", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of the output is gone, as after `| head`; nothing more can be printed.
        sys.stderr.close()
        code = 0
    except Exception as error:
        # typer and click each have their own class for a wrong command line; both can format it.
        if not hasattr(error, "format_message"):
            raise
        text = error.format_message()
        code = (
            _report_error(RequestError(text, remedy="See `mtmc --help`."), as_json) if text else RequestError.exit_code
        )
    sys.exit(code)


def _report_error(error: MtmcError, as_json: bool) -> int:
    if as_json:
        from mtmc_lsp.report.documents import error_document

        print(error_document(error))
    from mtmc_lsp.report.console import console, show_error

    show_error(console(stderr=True), error)
    return error.exit_code
