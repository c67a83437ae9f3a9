"""The function with which generated code runs its launches as one CUDA graph. The code policy recognises its exact text.

A CUDA graph launches all kernels of a call at once (CUDA C++ Programming Guide, 3.2.8.7). A graph reads and writes fixed
addresses. Therefore each call copies its arguments in and its results out, and new shapes or parameters need a new capture.
"""

from __future__ import annotations

MAX_GRAPHS = 4
"""Maximum number of cached graphs per file. Each holds memory for its intermediate values; a new capture evicts the oldest."""

GRAPHS = "from threading import Lock\n\n_GRAPHS, _CAPTURING = {}, Lock()\n"

RUN_CUDA_GRAPH = f'''def _run_cuda_graph(launch, arguments, fixed, updated=(), numbers=()):
    """Run ``launch(*arguments, *fixed, *numbers)`` as one CUDA graph on copies of ``arguments``; return copies.

    Graphs are cached by layout of ``arguments``, addresses of ``fixed`` (parameters are read in place) and stream.
    A call takes its graph out of the cache while it runs, and captures run one at a time. ``updated`` lists the
    indices in ``fixed`` of tensors that a launch writes to. A graph contains the values of ``numbers``; calls with
    other values launch directly.
    """
    if torch.cuda.is_current_stream_capturing():
        return launch(*arguments, *fixed, *numbers)
    stream = torch.cuda.current_stream()
    layouts = [(t.shape, t.stride(), t.dtype) for t in arguments]
    key = (launch, stream, *layouts, *[t.data_ptr() for t in fixed])
    cached = _GRAPHS.pop(key, None)
    if cached is None:
        if any(fixed[i].is_inference() for i in updated):
            return launch(*arguments, *fixed, *numbers)  # inference tensors cannot be written during capture
        for oldest in list(_GRAPHS)[: max(0, len(_GRAPHS) - {MAX_GRAPHS - 1})]:
            _GRAPHS.pop(oldest, None)
        with _CAPTURING, torch.inference_mode(False), torch.no_grad():
            inputs = [t.clone() for t in arguments]
            # Warm-up on copies: kernel compilation and library initialisation cannot be captured.
            side = torch.cuda.Stream()
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                launch(*inputs, *[t.clone() if i in updated else t for i, t in enumerate(fixed)], *numbers)
            stream.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = launch(*inputs, *fixed, *numbers)
        cached = graph, inputs, results, repr(numbers)
    graph, inputs, results, captured_numbers = cached
    if repr(numbers) != captured_numbers:
        _GRAPHS[key] = cached
        return launch(*arguments, *fixed, *numbers)
    for static, argument in zip(inputs, arguments):
        static.copy_(argument)
    graph.replay()
    copies = results.clone() if isinstance(results, torch.Tensor) else tuple(t.clone() for t in results)
    _GRAPHS[key] = cached
    return copies
'''


def without_cuda_graph(source: str) -> str:
    """Blank out the function, which is known to be safe, in ``source``; line numbers stay the same."""
    for snippet in (GRAPHS, RUN_CUDA_GRAPH):
        source = source.replace(snippet, "\n" * snippet.count("\n"))
    return source
