"""The peers that `benchmarks.engine` knows, and how each is started."""

from __future__ import annotations

from pathlib import Path

from benchmarks.float32_gguf import float32_gguf
from benchmarks.peer_process import ROOT, PeerKind, PeerProcess
from engine.model_directory import bundled_gguf
from kvferry.config import BUNDLED_MODEL

_VLLM_CACHE = ROOT / ".venv-vllm" / "compiled"

PEERS = {
    "llama.cpp": PeerKind("llama.cpp", ".venv-llama", "benchmarks.peers.llama_cpp_peer"),
    "vllm": PeerKind(
        "vllm",
        ".venv-vllm",
        "benchmarks.peers.vllm_peer",
        {
            # Its own advice: OpenMP of Intel, which comes with it.
            "LD_PRELOAD": str(ROOT / ".venv-vllm" / "lib" / "libiomp5.so"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CACHE_ROOT": str(_VLLM_CACHE),
            "TORCHINDUCTOR_CACHE_DIR": str(_VLLM_CACHE / "inductor"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        _VLLM_CACHE,
    ),
}


def start_peer(name: str, model: str, directory: Path, threads: int) -> PeerProcess:
    """A peer with the model loaded.

    `model`: as it is configured; `directory`: as `resolve_model` gives it. Raises
    `PeerUnavailable`, and `ConfigError` for a model that the peer cannot read.
    """
    if name == "llama.cpp":
        gguf = bundled_gguf() if model == BUNDLED_MODEL else Path(model)
        return PeerProcess(PEERS[name], float32_gguf(gguf), threads)
    return PeerProcess(PEERS[name], directory, threads)
