"""Using an SGLang server that already runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3x.engines import sglang_report
from eagle3x.engines.resolved import DTYPE_BYTES
from eagle3x.engines.server import Server, fetch
from eagle3x.engines.server_endpoint import ServerEndpoint
from eagle3x.engines.sglang_report import ALGORITHM, LOSSLESS, Reported
from eagle3x.engines.sglang_serve import sampling_refused
from eagle3x.engines.sglang_stream import GenerateDialect
from eagle3x.progress import log
from eagle3x.types import EagleError

if TYPE_CHECKING:
    from eagle3x.benchmark.config import Speculation
    from eagle3x.targets import Target


def reported(url: str) -> Reported:
    """What the SGLang server at `url` says of itself.

    Raises:
        EagleError: none answers there, or it reports in another way.
    """
    return sglang_report.read(json.loads(fetch(url, "/server_info")))


def attached_identity(url: str) -> dict[str, Any]:
    """What the server at `url` tells of what decides its floats, by the names that engines' identities have.

    Of its weights' quantization it tells only what it was asked for, so not of a checkpoint that is quantized.

    Raises:
        EagleError: none answers there, or it reports in another way.
    """
    found = reported(url)
    told = {
        "version": found.version,
        "torch": None,
        "attention": "+".join(sorted(found.attention)),
        "kv_cache_dtype": found.kv_cache_dtype,
        "device": found.device,
        "tensor_parallel": found.tensor_parallel,
        "prefix_cache": found.prefix_cache,
    }
    return told | ({"dtype": found.dtype} if found.dtype in DTYPE_BYTES else {})


def attach(url: str, target: Target, drafter: Path | None, speculation: Speculation | None) -> ServerEndpoint:
    """Use the server at `url`, which must speculate if and only if `speculation` says so, and in that way.

    Its drafter may lie elsewhere than in directory `drafter`: that is only said.

    Raises:
        EagleError: no server is ready there, or it serves something else.
    """
    server = Server.attach(url)
    named, found = f"serve.backend.url={server.url}", reported(server.url)
    classes = json.loads(fetch(server.url, "/model_info")).get("architectures")
    if classes is not None and target.model_class not in classes:
        raise EagleError(
            f"{named}: the server has {found.model_path}, a {', '.join(classes)}, and target {target.name} is a"
            f" {target.model_class}"
        )
    if found.algorithm not in (None, ALGORITHM):
        raise EagleError(
            f"{named}: the server speculates by {found.algorithm}, which would feed an EAGLE-3 drafter something else;"
            f" start it with --speculative-algorithm {ALGORITHM}"
        )
    if found.speculation != speculation:
        raise EagleError(
            f"{named}: the server speculates with {_words(found.speculation)}, but {_words(speculation)} was asked for"
        )
    if found.drafter is not None and drafter is not None and Path(found.drafter) != drafter:
        log(f"{server.url} serves the drafter {found.drafter}: it must be what is in {drafter}")
    if found.drafter_quantization is not None:
        log(f"{server.url} quantizes its drafter, too ({found.drafter_quantization}): it is not what was exported")
    if found.speculation is not None and not found.metrics:
        log(f"{server.url} runs without --enable-metrics: that others use it while it is measured would not be seen")
    return ServerEndpoint(
        server,
        GenerateDialect(target, speculation, metrics=found.metrics),
        per_request_counters=speculation is not None,
        prefix_cache=found.prefix_cache,
        sampling_refused=None if speculation is None else sampling_refused(found.device) or _sampled_otherwise(found),
    )


def _sampled_otherwise(found: Reported) -> str | None:
    if found.lossless:
        return None
    return f"the server was started with other rules of acceptance than SGLang's own: leave out {', '.join(LOSSLESS)}"


def _words(speculation: Speculation | None) -> str:
    if speculation is None:
        return "no drafter"
    k, topk, nodes = speculation.num_speculative_tokens, speculation.topk, speculation.drafts + 1
    return f"num_speculative_tokens={k}, topk={topk}, num_draft_tokens={nodes}"
