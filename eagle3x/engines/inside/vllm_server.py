"""vLLM's own OpenAI server, with the arguments of its command line, started from a file that imports nothing by itself.

The process of its engine is spawned, and such a process first imports what the server was started from: with `python -m
vllm.entrypoints.openai.api_server` all of the HTTP server, which an engine never uses (8 s on two cores).
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
