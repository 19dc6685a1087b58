"""An engine's own server, started from a file that imports nothing by itself: `engine_server.py MODULE ARGUMENTS...`,
as `python -m MODULE ARGUMENTS...`.

The engine's processes are spawned, and such a process first imports what the server was started from: with `python -m
vllm.entrypoints.openai.api_server` all of the HTTP server, which an engine never uses (8 s on two cores).
"""

import gc
import runpy
import sys

# Spawned processes come here too. The million objects that an import makes stay: looking through them again and again
# takes a quarter of vLLM's, a seventh of SGLang's.
gc.set_threshold(50_000)

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")
