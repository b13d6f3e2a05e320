# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "guidellm==0.8.1", "torch==2.13.0", "aiohttp==3.14.5", "msgspec==0.22.0", "orjson==3.13.0",
#     "regex==2026.11.19", "requests==2.34.2", "tqdm==4.70.1",
# ]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# [tool.elsewhere]
# no-deps = ["vllm==0.33.0", "sglang==0.5.23"]
# ///
"""vLLM 0.33.0, SGLang 0.5.23, guidellm 0.8.1: three times per output token for one stream of four tokens.

Each benchmark sends its own request to a local server. vLLM divides by the time up to the last token, SGLang up to
the end of the stream, and guidellm counts from the start of the request. The stream: 0.2 s role, 0.4 "A", 0.6 "B",
1.0 " C D" (two tokens), 1.2 finish_reason, 1.6 usage, 2.0 [DONE]. The wheels of vLLM (1 GB) and SGLang are installed
without what they depend on, and we load the file of the client alone.
"""

from report import report

import asyncio
import importlib.util
import json
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import aiohttp
from guidellm.backends.openai.http import OpenAIHTTPBackend
from guidellm.schemas import GenerationRequest, RequestInfo
from guidellm.schemas.backends.openai_http import OpenAIHTTPBackendArgs


def chunk(delta=None, finish=None, usage=None):
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    message = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": choices}
    return json.dumps(message | ({"usage": usage} if usage else {}))


STREAM = {
    0.2: chunk({"role": "assistant", "content": ""}),
    0.4: chunk({"content": "A"}),
    0.6: chunk({"content": "B"}),
    1.0: chunk({"content": " C D"}),
    1.2: chunk({}, finish="stop"),
    1.6: chunk(usage={"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}),
    2.0: "[DONE]",
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        start = time.perf_counter()
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for at, data in STREAM.items():
            time.sleep(max(0, start + at - time.perf_counter()))
            self.wfile.write(f"data: {data}\n\n".encode())
            self.wfile.flush()

    def log_message(self, *arguments):
        pass


def folder_of(package):
    return importlib.util.find_spec(package).submodule_search_locations[0]


async def with_vllm():
    path = folder_of("vllm") + "/benchmarks/lib/endpoint_request_func.py"
    spec = importlib.util.spec_from_file_location("vllm_client", path)
    client = sys.modules["vllm_client"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(client)
    request = client.RequestFuncInput("Hi", URL, prompt_len=1, output_len=4, model="m")
    async with aiohttp.ClientSession() as session:
        output = await client.async_request_openai_chat_completions(request, session)
    return (output.latency - output.ttft) / (output.output_tokens - 1)  # as in its calculate_metrics


async def with_sglang():
    unused = {  # what the client imports and does not use here
        "sglang.srt": [],
        "sglang.srt.disaggregation": [],
        "sglang.srt.disaggregation.utils": ["FAKE_BOOTSTRAP_HOST"],
        "sglang.srt.utils": [],
        "sglang.srt.utils.network": ["resolve_base_url", "resolve_host_port"],
        "sglang.benchmark.datasets": ["DatasetRow", "get_dataset"],
        "sglang.benchmark.datasets.mooncake": ["get_mooncake_request_over_time"],
    }
    folders = {"sglang": [], "sglang.benchmark": [folder_of("sglang") + "/benchmark"]}
    for name in folders | unused:
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = folders.get(name, [])
        for attribute in unused.get(name, []):
            setattr(module, attribute, None)
    import sglang.benchmark.serving as client

    client.args = types.SimpleNamespace(disable_stream=False, disable_ignore_eos=True, header=None)
    request = client.RequestFuncInput("Hi", URL, 1, 4, "m", lora_name="", image_data=None, extra_request_body={})
    output = await client.async_request_openai_chat_completions(request)
    tokenizer = types.SimpleNamespace(encode=lambda text, **settings: text.split())
    return client.calculate_metrics(None, [output], 2.0, tokenizer, "sglang-oai-chat")[0].mean_tpot_ms / 1000


async def with_guidellm():
    target = URL.removesuffix("/v1/chat/completions")
    backend = OpenAIHTTPBackend(OpenAIHTTPBackendArgs(target=target, model="m", request_format="/v1/chat/completions"))
    await backend.process_startup()
    request = GenerationRequest(columns={"text_column": ["Hi"]})
    info = RequestInfo(request_id=request.request_id)
    info.timings.resolve_start = time.time()
    async for answer in backend.resolve(request, info):
        response, info = answer
    info.timings.resolve_end = time.time()
    info.status = "completed"
    await backend.process_shutdown()
    return response.compile_stats(request, info).time_per_output_token_ms / 1000


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
URL = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
clients = {"vLLM": (with_vllm, 0.2), "SGLang": (with_sglang, 0.53), "guidellm": (with_guidellm, 0.25)}
report({f"{name}, TPOT in s": (asyncio.run(client()), expected) for name, (client, expected) in clients.items()})
