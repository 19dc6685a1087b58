"""Of an engine's log the lines that say why it ended. The snippets are from logs of engines that failed, shortened."""

from __future__ import annotations

import pytest

from eagle3x.engines.log_excerpt import LONGEST, TRACEBACK, raised

SGLANG = """\
[2026-11-30 20:41:17] Memory pool end. avail mem=135.14 GB
[2026-11-30 20:41:18] Scheduler hit an exception: Traceback (most recent call last):
  File "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py", line 353, in __init__
    self.capture()
  File "sglang/jit_kernel/gptq_marlin.py", line 98, in gptq_marlin_gemm
    module.gptq_marlin_gemm(
RuntimeError: Runtime check failed at gptq_marlin.cuh:667: Invalid thread config: num_bits = 4, group_size = 64

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "sglang/srt/managers/scheduler.py", line 436, in __init__
    self.init_model_worker()
                ^^^^^^^^^^
Exception: Capture cuda graph failed: Runtime check failed at gptq_marlin.cuh:667: Invalid thread config
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)
Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose


[2026-11-30 20:41:18] Received sigquit from a child process. It usually means the child failed.
[2026-11-30 20:41:18] kill_process_tree called: parent_pid=10349, include_parent=True, pid=10349
"""
VLLM = """\
(APIServer pid=14971) WARNING 11-30 17:52:30 [system_utils.py:255] Found ulimit of 20000 and failed to automatically\
 increase with error current limit. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.
(EngineCore pid=15492) ERROR 11-30 17:57:57 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=15492) ERROR 11-30 17:57:57 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=15492) ERROR 11-30 17:57:57 [core.py:1512]   File "vllm/_custom_ops.py", line 4453, in cpu_gemm
(EngineCore pid=15492) ERROR 11-30 17:57:57 [core.py:1512]     torch.ops._C.cpu_gemm_wna16(
(APIServer pid=14971) ERROR 11-30 17:57:57 [async_llm.py:906] Traceback (most recent call last):
(EngineCore pid=15492) ERROR 11-30 17:57:57 [core.py:1512]     ^^^^^^^^^^^^^^^^^^^^^^^^^^^
(APIServer pid=14971) ERROR 11-30 17:57:57 [async_llm.py:906]     raise self._format_exception(outputs) from None
(EngineCore pid=15492) ERROR 11-30 17:57:57 [core.py:1512] AttributeError: '_OpNamespace' '_C' object has no attribute\
 'cpu_gemm_wna16'
(APIServer pid=14971) ERROR 11-30 17:57:57 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore\
 encountered an issue. See stack trace (above) for the root cause.
(APIServer pid=14971) ERROR 11-30 17:57:57 [serving.py:500] Traceback (most recent call last):
(APIServer pid=14971) ERROR 11-30 17:57:57 [serving.py:500]     raise output
(APIServer pid=14971) ERROR 11-30 17:57:57 [serving.py:500] vllm.v1.engine.exceptions.EngineDeadError: EngineCore\
 encountered an issue. See stack trace (above) for the root cause.
(APIServer pid=14971) INFO:     Shutting down
/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked
"""
ARGUMENTS = "usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments: --no-such-argument\n"
SOUND = "INFO:     Started server process [1]\n2026-11-30 ERROR: a word\nValueError: said without a traceback\n"
BARE = "Traceback (most recent call last):\n  File 'x', line 1\nAssertionError\nKilled\n"
RANK = "[rank0]: Traceback (most recent call last):\n[rank0]:   File 'x'\n[rank0]: torch.OutOfMemoryError: CUDA\n"


@pytest.mark.parametrize(
    ("log", "wanted"),
    [
        (SGLANG, ["RuntimeError: Runtime check failed at gptq_marlin.cuh:667: Invalid thread config: num_bits = 4, "
                  "group_size = 64",
                  "Exception: Capture cuda graph failed: Runtime check failed at gptq_marlin.cuh:667: "
                  "Invalid thread config"]),
        (VLLM, ["AttributeError: '_OpNamespace' '_C' object has no attribute 'cpu_gemm_wna16'",
                "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
                "See stack trace (above) for the root cause."]),
        (ARGUMENTS, ["launch_server.py: error: unrecognized arguments: --no-such-argument"]),
        (SOUND, []),
        (BARE, ["AssertionError"]),
        (RANK, ["torch.OutOfMemoryError: CUDA"]),
        ("", []),
    ],
    ids=["sglang", "vllm", "arguments", "sound", "bare", "rank", "empty"],
)  # fmt: skip
def test_the_exceptions_own_lines_in_the_order_of_the_log(log: str, wanted: list[str]) -> None:
    assert raised(log.splitlines()) == wanted


def test_a_long_line_is_cut_and_many_are_few() -> None:
    found = raised(line for i in range(9) for line in (TRACEBACK, f"Error{i}: " + "x" * 5000))
    assert [line[:7] for line in found] == ["Error0:", "Error1:", "Error2:", "Error3:"]
    assert {len(line) for line in found} == {LONGEST}
