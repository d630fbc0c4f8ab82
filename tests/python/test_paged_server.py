"""mlx_lm.server, unchanged, with a model whose caches are paged and compressed."""

from __future__ import annotations

import argparse
import gc
import json
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer

import pytest
from kvpool import BlockPoolAllocator, PoolConfig
from kvpool import mlx_lm as paged
from kvpool._core import PagedStorage
from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache

ARGUMENTS = {
    "model": None,
    "adapter_path": None,
    "draft_model": None,
    "num_draft_tokens": 3,
    "trust_remote_code": False,
    "chat_template": None,
    "use_default_chat_template": False,
    "chat_template_args": {},
    "allowed_origins": ["*"],
    "temp": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 8,
    "decode_concurrency": 4,
    "prompt_concurrency": 2,
    "prefill_step_size": 16,
    "prompt_cache_size": 10,
    "prompt_cache_bytes": None,
    "pipeline": False,
    "kv_bits": None,
    "kv_group_size": 64,
    "quantized_kv_start": 0,
}


class Provider(server.ModelProvider):
    """Serves the model at hand instead of loading one."""

    def __init__(self, model, tokenizer):
        super().__init__(argparse.Namespace(**ARGUMENTS))
        self._loaded = model, tokenizer

    def load(self, *args):
        self.model, self.tokenizer = self._loaded
        self.model_key = ("default_model", None, None)
        self.is_batchable = True
        return self._loaded

    def load_default(self):
        self.load()


@pytest.fixture
def served(default_model):
    """(address, storage, prompt cache, generator) of a server that runs."""
    model, tokenizer, _ = default_model
    storage = PagedStorage(BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=64, grow_on_exhaustion=True)))
    paged.attach(model, storage, format="int8", window=16)
    kept = LRUPromptCache(10)
    generator = server.ResponseGenerator(Provider(model, tokenizer), kept)
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: server.APIHandler(generator, *args))
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}", storage, kept, generator
    httpd.shutdown()
    httpd.server_close()
    generator.stop_and_join()
    thread.join()
    object.__delattr__(model, "make_cache")
    paged.uninstall()


def entries(kept):
    """The caches that the server keeps for prompts to come."""
    for queue in kept._lru._lrus.values():
        for model, tokens in queue:
            yield kept._trie.get(model, tokens).prompt_cache


def ask(address, prompt):
    body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_concurrent_requests_are_answered_and_leak_no_block(served):
    address, storage, kept, generator = served
    start = "The history of the city begins when the first settlers came down the river and built "
    prompts = [start + "a bridge", start + "a mill beside it", "One, two, three,", start + "a church"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: ask(address, prompt), prompts))
    assert [a["usage"]["completion_tokens"] for a in answers] == [8] * len(prompts)
    again = ask(address, prompts[0])
    assert again["choices"][0]["text"] == answers[0]["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert len(kept) >= 1 and storage.pool.stats.blocks_in_use() > 0
    generator.stop_and_join()
    held = {id(cache): cache for entry in entries(kept) for cache in entry}
    assert storage.pool.stats.blocks_in_use() <= sum(2 * -(-cache.offset // 16) for cache in held.values())
    del held
    kept.trim_to(n_sequences=0)
    for _ in range(100):  # the server's threads let go of their requests as they end
        gc.collect()
        if storage.pool.stats.blocks_in_use() == 0:
            break
        time.sleep(0.1)
    assert storage.pool.stats.blocks_in_use() == 0
    assert storage.resident_bytes() == 0
