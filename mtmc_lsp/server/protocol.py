"""The pygls protocol with custom document synchronisation, and with capabilities that pygls does not advertise yet."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException, JsonRpcInvalidRequest, JsonRpcParseError
from pygls.protocol import LanguageServerProtocol, lsp_method

from mtmc_lsp.server.handshake import DIFF_SCHEME, Greeting
from mtmc_lsp.server.text import Document, Text

if TYPE_CHECKING:
    from mtmc_lsp.server.server import Server


class Protocol(LanguageServerProtocol):
    """One client's connection."""

    _server: Server
    greeting = Greeting(b"")
    """The answer to ``initialize`` that was sent before the server was imported."""

    _is_initialized = False
    """Whether ``initialize`` was received."""
    _is_shut_down = False
    """Whether ``shutdown`` was received. pygls sets its own flag after jobs were stopped."""

    def receive(self, body: bytes) -> None:
        """Handle the body of one message. An invalid message is answered with an error."""
        try:
            message = json.loads(body, object_hook=self.structure_message)
        except JsonRpcException as error:
            # Answered by structure_message.
            self._server.report_server_error(error, JsonRpcException)
            return
        except (ValueError, RecursionError) as error:
            self._refuse(None, JsonRpcParseError(str(error)).to_response_error())
            return
        try:
            self.handle_message(message)
        except Exception as error:
            self._server.report_server_error(error, JsonRpcException)

    def handle_message(self, message: Any) -> None:
        """Delegate a message, unless the protocol does not allow it at this point."""
        method, number = getattr(message, "method", None), getattr(message, "id", None)
        error = self._order_error(message, method)
        if error is None:
            self._is_initialized |= method == lsp.INITIALIZE
            self._is_shut_down |= method == lsp.SHUTDOWN
            super().handle_message(message)
        elif number is not None or method is None:
            self._refuse(number, error)

    def _refuse(self, number: int | str | None, error: lsp.ResponseError) -> None:
        # As plain data: lsprotocol would leave out an id that is null.
        self._send_data({"jsonrpc": "2.0", "id": number, "error": {"code": error.code, "message": error.message}})

    def _order_error(self, message: Any, method: str | None) -> lsp.ResponseError | None:
        if not hasattr(message, "jsonrpc"):
            return lsp.ResponseError(JsonRpcInvalidRequest.CODE, "the message is no JSON-RPC 2.0 object")
        if method is None or method == lsp.EXIT:
            return None
        if self._is_shut_down:
            return lsp.ResponseError(JsonRpcInvalidRequest.CODE, "the server has shut down")
        if method == lsp.INITIALIZE:
            text = "the server is already initialized"
            return lsp.ResponseError(JsonRpcInvalidRequest.CODE, text) if self._is_initialized else None
        if not self._is_initialized:
            return lsp.ResponseError(lsp.ErrorCodes.ServerNotInitialized, "the first request must be initialize")
        return None

    def structure_message(self, data: dict[str, Any]) -> Any:
        """Parse a message. An invalid request is answered with an error, so that the client does not wait for it."""
        try:
            return super().structure_message(data)
        except JsonRpcException as error:
            if self._is_greeting(data.get("id")):
                # It was already answered, so the server must start: assume a client with only the agreed capabilities.
                return super().structure_message({**data, "params": self._minimal_params(data["params"])})
            if isinstance(data.get("method"), str) and isinstance(data.get("id"), (int, str)):
                self._send_response(data["id"], None, error.to_response_error())
            raise

    def _is_greeting(self, number: object) -> bool:
        return number is not None and number == self.greeting.answered

    def _minimal_params(self, params: dict[str, Any]) -> dict[str, Any]:
        capabilities = {"general": {"positionEncodings": [self.greeting.encoding]}}
        options = params.get("initializationOptions")
        return {"processId": None, "rootUri": None, "capabilities": capabilities, "initializationOptions": options}

    def _send_response(self, msg_id: int | str, result: Any = None, error: lsp.ResponseError | None = None) -> None:
        if self._is_greeting(msg_id):
            # Only once: a later request that reuses this id (a protocol violation) gets its own answer.
            self.greeting = Greeting(b"")
            self._result_types.pop(msg_id, None)
            return
        super()._send_response(msg_id, result, error)

    @lsp_method(lsp.EXIT)
    def lsp_exit(self, *args: Any) -> Generator[Any, Any, None]:
        """End the process, or only this connection if the process serves other clients too."""
        if self._server.is_alone:
            yield from super().lsp_exit(*args)
        elif self.writer is not None:
            self.writer.close()

    @lsp_method(lsp.INITIALIZE)
    def lsp_initialize(self, params: lsp.InitializeParams) -> Generator[Any, Any, lsp.InitializeResult]:
        """Answer with the server's capabilities."""
        result: lsp.InitializeResult = yield from super().lsp_initialize(params)
        workspace = result.capabilities.workspace
        if workspace is not None and shows_content(params.capabilities):
            workspace.text_document_content = lsp.TextDocumentContentOptions(schemes=[DIFF_SCHEME])
        return result

    @lsp_method(lsp.TEXT_DOCUMENT_DID_OPEN)
    def lsp_text_document__did_open(self, params: lsp.DidOpenTextDocumentParams) -> Generator[Any, Any, None]:
        """Store an opened document."""
        item = params.text_document
        text = Text(item.text, str(self.workspace.position_encoding or "utf-16"))
        self._server.documents[item.uri] = Document(item.uri, item.language_id, item.version, text)
        yield from self._call_handler(lsp.TEXT_DOCUMENT_DID_OPEN, params)

    @lsp_method(lsp.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(self, params: lsp.DidChangeTextDocumentParams) -> Generator[Any, Any, None]:
        """Apply the client's edits in order."""
        document = self._server.documents.get(params.text_document.uri)
        if document is None:
            # The document was never opened: there is no text to change.
            return
        for change in params.content_changes:
            if isinstance(change, lsp.TextDocumentContentChangePartial):
                document.text.replace(change.range, change.text)
            else:
                document.text.replace_all(change.text)
        document.version = params.text_document.version
        yield from self._call_handler(lsp.TEXT_DOCUMENT_DID_CHANGE, params)

    @lsp_method(lsp.TEXT_DOCUMENT_DID_CLOSE)
    def lsp_text_document__did_close(self, params: lsp.DidCloseTextDocumentParams) -> Generator[Any, Any, None]:
        """Remove a closed document."""
        self._server.documents.pop(params.text_document.uri, None)
        yield from self._call_handler(lsp.TEXT_DOCUMENT_DID_CLOSE, params)

    def _call_handler(self, method: str, params: Any) -> Generator[Any, Any, None]:
        handler = self.fm.features.get(method)
        if handler is not None:
            yield handler, (params,), None


def shows_content(capabilities: lsp.ClientCapabilities) -> bool:
    """Whether the client supports ``workspace/textDocumentContent``."""
    return capabilities.workspace is not None and capabilities.workspace.text_document_content is not None
