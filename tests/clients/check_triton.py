"""The tritonclient package, over HTTP and over gRPC: a server, and a router before it."""

import asyncio
import json
import os
import queue
import re
import subprocess
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from ridgeline.engine.setup.home import locate

MODEL = os.environ["RIDGELINE_MODEL"]
PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 12}


@contextmanager
def serving(*words):
    """Run a server with a gRPC port, from this environment; yield both addresses."""
    command = ["ridgeline", "serve", *words, "--port", "0", "--grpc-port", "0"]
    home = {"HOME": os.environ["RIDGELINE_USER_HOME"]}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | home
    ) as server:
        try:
            found = re.search(r"ready at (http://\S+) .*gRPC: ([\w.:]+)", server.stdout.readline())
            assert found, "the server did not start"
            yield found[1], found[2]
        finally:
            server.terminate()


@pytest.fixture(scope="session", params=["server", "router"])
def addresses(request, tmp_path_factory):
    if request.param == "server":
        with serving(MODEL) as found:
            yield found
    else:
        folder = tmp_path_factory.mktemp("models")
        path = Path(locate(MODEL).path)
        (folder / (MODEL + (path.suffix if path.is_file() else ""))).symlink_to(path)
        with serving("--models-dir", str(folder)) as found:
            yield found


@pytest.fixture(scope="session", params=["http", "grpc"])
def triton(request, addresses):
    """One of the two clients."""
    url, grpc_address = addresses
    module = tritonclient.http if request.param == "http" else tritonclient.grpc
    address = url.removeprefix("http://") if request.param == "http" else grpc_address
    client = module.InferenceServerClient(address)
    yield SimpleNamespace(client=client, module=module, kind=request.param, url=url)
    client.close()


@pytest.fixture
def over_grpc(triton):
    if triton.kind != "grpc":
        pytest.skip("of gRPC alone")
    return triton


@pytest.fixture
def over_http(triton):
    if triton.kind != "http":
        pytest.skip("of HTTP alone")
    return triton


def tensor(triton, name, values, kind="BYTES"):
    types = {"BYTES": np.object_, "BOOL": bool, "INT32": np.int32, "FP32": np.float32}
    values = [one.encode() if isinstance(one, str) else one for one in values]
    found = triton.module.InferInput(name, [len(values)], kind)
    found.set_data_from_numpy(np.array(values, dtype=types[kind]))
    return found


def ask(triton, *texts, more=(), wanted=None, **parameters):
    inputs = [tensor(triton, "text_input", texts or [PROMPT]), *more]
    outputs = wanted and [triton.module.InferRequestedOutput(name) for name in wanted]
    return triton.client.infer(
        MODEL, inputs, outputs=outputs, parameters=GREEDY | parameters, request_id="7"
    )


def texts_of(result, name="text_output"):
    return [one.decode() for one in result.as_numpy(name)]


def completion(url, **fields):
    body = {"model": MODEL, "prompt": PROMPT} | GREEDY | fields
    head = {"content-type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["choices"][0]["text"]


# --- server and model ----------------------------------------------------------------------------


def test_it_lives_and_is_ready(triton):
    assert triton.client.is_server_live()
    assert triton.client.is_server_ready()


def test_which_models_are_ready(triton):
    assert triton.client.is_model_ready(MODEL)
    assert triton.client.is_model_ready(MODEL, "1")
    assert not triton.client.is_model_ready(MODEL, "2")
    assert not triton.client.is_model_ready("nope")


def test_metadata_of_the_server(triton):
    as_json = {"as_json": True} if triton.kind == "grpc" else {}
    said = triton.client.get_server_metadata(**as_json)
    assert said["name"] == "ridgeline"
    assert "binary_tensor_data" in said["extensions"]


def test_metadata_of_the_model(triton):
    as_json = {"as_json": True} if triton.kind == "grpc" else {}
    said = triton.client.get_model_metadata(MODEL, **as_json)
    assert said["name"] == MODEL
    assert said["inputs"][0]["name"] == "text_input"
    assert said["outputs"][0]["datatype"] == "BYTES"
    with pytest.raises(InferenceServerException, match="there is no model 'nope'"):
        triton.client.get_model_metadata("nope")


def test_configuration(triton):
    as_json = {"as_json": True} if triton.kind == "grpc" else {}
    said = triton.client.get_model_config(MODEL, **as_json)
    said = said.get("config", said)
    assert said["model_transaction_policy"]["decoupled"]
    assert said["input"][0]["data_type"] == "TYPE_STRING"
    assert said["input"][1]["optional"]


def test_index(triton):
    as_json = {"as_json": True} if triton.kind == "grpc" else {}
    said = triton.client.get_model_repository_index(**as_json)
    said = said["models"] if triton.kind == "grpc" else said
    assert [(one["name"], one["state"]) for one in said] == [(MODEL, "READY")]


@pytest.mark.parametrize("action", ["load_model", "unload_model"])
def test_models_are_not_loaded_by_request(triton, action):
    with pytest.raises(InferenceServerException, match="not loaded or unloaded by request"):
        getattr(triton.client, action)(MODEL)


def test_what_there_is_not_is_an_error(triton):
    with pytest.raises(InferenceServerException):
        triton.client.get_system_shared_memory_status()
    with pytest.raises(InferenceServerException):
        triton.client.get_trace_settings()


# --- infer ---------------------------------------------------------------------------------------


def test_a_text_has_the_answer_of_the_other_api(triton):
    assert texts_of(ask(triton)) == [completion(triton.url)]


def test_the_answer_names_request_and_model(triton):
    said = ask(triton).get_response()
    said = said if triton.kind == "http" else {"id": said.id, "model_name": said.model_name}
    assert (said["id"], said["model_name"]) == ("7", MODEL)


def test_several_texts_at_once(triton):
    first, second = texts_of(ask(triton, PROMPT, "Water is"))
    assert first == completion(triton.url)
    assert second == completion(triton.url, prompt="Water is")


def test_several_answers_to_a_text(triton):
    assert len(texts_of(ask(triton, n=3, temperature=1.0))) == 3


def test_a_seed_gives_an_answer_again(triton):
    drawn = {"temperature": 1.0, "seed": 5}
    assert texts_of(ask(triton, **drawn)) == texts_of(ask(triton, **drawn))
    assert texts_of(ask(triton, **drawn)) == [completion(triton.url, **drawn)]


def test_a_stop_string(triton):
    whole = texts_of(ask(triton))[0]
    stop = whole.split()[2]
    assert texts_of(ask(triton, stop=stop)) == [whole[: whole.index(stop)]]


def test_outputs_that_are_asked_for(triton):
    names = ["text_output", "finish_reason", "num_input_tokens", "num_output_tokens"]
    said = ask(triton, wanted=names)
    assert texts_of(said, "finish_reason") == ["length"]
    assert said.as_numpy("num_output_tokens").tolist() == [12]
    assert said.as_numpy("num_input_tokens").tolist()[0] > 3
    flag = tensor(triton, "return_finish_reason", [True], "BOOL")
    assert texts_of(ask(triton, more=[flag]), "finish_reason") == ["length"]


def test_sampling_parameters_as_text(triton):
    given = json.dumps({"max_tokens": "3", "temperature": "0"})
    said = ask(triton, more=[tensor(triton, "sampling_parameters", [given])], max_tokens=3)
    assert texts_of(said) == [completion(triton.url, max_tokens=3)]


def test_a_parameter_as_a_tensor(triton):
    inputs = [
        tensor(triton, "text_input", [PROMPT]),
        tensor(triton, "max_tokens", [4], "INT32"),
        tensor(triton, "temperature", [0.0], "FP32"),
    ]
    found = texts_of(triton.client.infer(MODEL, inputs))
    assert found == [completion(triton.url, max_tokens=4)]


def test_the_input_is_repeated_if_that_is_wanted(triton):
    flag = tensor(triton, "exclude_input_in_output", [False], "BOOL")
    assert texts_of(ask(triton, more=[flag])) == [PROMPT + completion(triton.url)]


def test_a_vector(triton):
    found = ask(triton, "x", "y", wanted=["embedding"]).as_numpy("embedding")
    assert found.dtype == np.float32
    assert found.shape[0] == 2
    assert np.allclose((found * found).sum(1), 1, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "fields", "message"),
    [
        ([("nope", ["x"], "BYTES")], {}, "there is no input 'nope'"),
        ([("max_tokens", [0.5], "FP32")], {}, "max_tokens"),
        ([], {"temperature": 9}, "temperature is 9"),
        ([], {"max_tokens": "many"}, "max_tokens"),
        ([("sampling_parameters", ["no json"], "BYTES")], {}, "write a JSON object"),
        ([("stream", [True], "BOOL")], {}, "infer answers once"),
        ([], {"sequence_id": 4}, "sequence_id is not supported"),
    ],
)
def test_what_is_wrong_is_named(triton, more, fields, message):
    inputs = [tensor(triton, "text_input", [PROMPT]), *(tensor(triton, *one) for one in more)]
    fields = dict(fields)
    sequence = fields.pop("sequence_id", 0)
    given = ({} if "max_tokens" in str(more) else GREEDY) | fields
    with pytest.raises(InferenceServerException, match=message) as error:
        triton.client.infer(MODEL, inputs, parameters=given, sequence_id=sequence)
    assert error.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_a_text_is_needed_and_one_that_is_text(triton):
    with pytest.raises(InferenceServerException, match="text_input is missing"):
        triton.client.infer(MODEL, [tensor(triton, "max_tokens", [4], "INT32")])
    broken = triton.module.InferInput("text_input", [1], "BYTES")
    broken.set_data_from_numpy(np.array([b"\xff\xfe"], dtype=np.object_))
    with pytest.raises(InferenceServerException, match="not UTF-8"):
        triton.client.infer(MODEL, [broken])


def test_models_that_are_not_here(triton):
    inputs = [tensor(triton, "text_input", [PROMPT])]
    for name, version in (("nope", ""), (MODEL, "2")):
        with pytest.raises(InferenceServerException, match="there is no") as error:
            triton.client.infer(name, inputs, model_version=version)
        assert error.value.status() in ("404", "StatusCode.NOT_FOUND")


def test_outputs_that_are_not_here(triton):
    with pytest.raises(InferenceServerException, match="there is no output 'nope'"):
        ask(triton, wanted=["nope"])


def test_asynchronous_requests(triton):
    inputs = [tensor(triton, "text_input", [PROMPT])]
    if triton.kind == "http":
        waiting = [triton.client.async_infer(MODEL, inputs, parameters=GREEDY) for _ in range(3)]
        found = [one.get_result() for one in waiting]
    else:
        done = queue.Queue()
        for _ in range(3):
            triton.client.async_infer(
                MODEL, inputs, lambda result, error: done.put((result, error)), parameters=GREEDY
            )
        found = [result for result, error in (done.get(timeout=60) for _ in range(3)) if not error]
    assert [texts_of(one) for one in found] == [[completion(triton.url)]] * 3


def test_the_asyncio_client(triton, addresses):
    async def run():
        aio = triton.module.aio
        address = addresses[triton.kind == "grpc"].removeprefix("http://")
        async with aio.InferenceServerClient(address) as client:
            inputs = [tensor(triton, "text_input", [PROMPT])]
            return await client.infer(MODEL, inputs, parameters=GREEDY)

    assert texts_of(asyncio.run(run())) == [completion(triton.url)]


# --- of HTTP alone -------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_requests(over_http, coding):
    inputs = [tensor(over_http, "text_input", [PROMPT])]
    found = over_http.client.infer(
        MODEL, inputs, parameters=GREEDY, request_compression_algorithm=coding
    )
    assert texts_of(found) == [completion(over_http.url)]


def test_tensors_in_json(over_http):
    given = over_http.module.InferInput("text_input", [1], "BYTES")
    given.set_data_from_numpy(np.array([PROMPT.encode()], dtype=np.object_), binary_data=False)
    wanted = [over_http.module.InferRequestedOutput("text_output", binary_data=False)]
    found = over_http.client.infer(MODEL, [given], outputs=wanted, parameters=GREEDY)
    assert found.get_output("text_output")["data"] == [completion(over_http.url)]


def test_generate_and_its_stream(over_http):
    def post(path):
        body = json.dumps({"text_input": PROMPT, "parameters": GREEDY}).encode()
        url = f"{over_http.url}/v2/models/{MODEL}/{path}"
        head = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, head)) as answer:
            return answer.read().decode()

    assert json.loads(post("generate"))["text_output"] == completion(over_http.url)
    lines = [line for line in post("generate_stream").splitlines() if line.startswith("data: ")]
    pieces = [json.loads(line[6:])["text_output"] for line in lines]
    assert len(pieces) > 3
    assert "".join(pieces) == completion(over_http.url)


# --- of gRPC alone -------------------------------------------------------------------------------


class Streaming:
    """A stream of the client's, and what came on it."""

    def __init__(self, triton):
        self.triton, self.came = triton, queue.Queue()
        triton.client.start_stream(lambda result, error: self.came.put((result, error)))

    def send(self, name="", *, wants_last=True, **parameters):
        inputs = [
            tensor(self.triton, "text_input", [PROMPT]),
            tensor(self.triton, "stream", [True], "BOOL"),
        ]
        self.triton.client.async_stream_infer(
            MODEL,
            inputs,
            request_id=name,
            parameters=GREEDY | parameters,
            enable_empty_final_response=wants_last,
        )

    def pieces(self, count=1):
        """The texts of so many requests by their names, each to its last message."""
        found = {}
        while count:
            result, error = self.came.get(timeout=60)
            assert error is None, error
            said = result.get_response()
            found.setdefault(said.id, [])
            if said.parameters["triton_final_response"].bool_param:
                count -= 1
            else:
                found[said.id] += texts_of(result)
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.triton.client.stop_stream(cancel_requests=True)


def test_a_stream_has_the_whole_answer_in_pieces(over_grpc):
    with Streaming(over_grpc) as stream:
        stream.send("a")
        pieces = stream.pieces()["a"]
    assert len(pieces) > 3
    assert "".join(pieces) == completion(over_grpc.url)


def test_requests_of_one_stream_are_answered_side_by_side(over_grpc):
    with Streaming(over_grpc) as stream:
        for name in "abc":
            stream.send(name, seed=ord(name), temperature=1.0)
        found = stream.pieces(3)
    for name in "abc":
        whole = completion(over_grpc.url, seed=ord(name), temperature=1.0)
        assert "".join(found[name]) == whole


def test_an_error_does_not_end_its_stream(over_grpc):
    with Streaming(over_grpc) as stream:
        stream.send("a", temperature=9)
        _, error = stream.came.get(timeout=60)
        assert "temperature is 9" in str(error)
        stream.send("b")
        assert "".join(stream.pieces()["b"]) == completion(over_grpc.url)


def test_a_stream_without_a_last_message_and_one_answer(over_grpc):
    inputs = [tensor(over_grpc, "text_input", [PROMPT])]
    with Streaming(over_grpc) as stream:
        over_grpc.client.async_stream_infer(MODEL, inputs, parameters=GREEDY)
        result, error = stream.came.get(timeout=60)
    assert error is None
    assert texts_of(result) == [completion(over_grpc.url)]


def test_who_cancels_a_stream_ends_its_request(over_grpc):
    with Streaming(over_grpc) as stream:
        stream.send("a", max_tokens=2000, ignore_eos=True)
        stream.came.get(timeout=60)
    with Streaming(over_grpc) as stream:
        stream.send("b")
        assert "".join(stream.pieces()["b"]) == completion(over_grpc.url)


def test_a_compressed_call(over_grpc):
    inputs = [tensor(over_grpc, "text_input", [PROMPT])]
    found = over_grpc.client.infer(MODEL, inputs, parameters=GREEDY, compression_algorithm="gzip")
    assert texts_of(found) == [completion(over_grpc.url)]


def test_the_asyncio_stream(over_grpc, addresses):
    async def run():
        async def requests():
            yield {
                "model_name": MODEL,
                "inputs": [
                    tensor(over_grpc, "text_input", [PROMPT]),
                    tensor(over_grpc, "stream", [True], "BOOL"),
                ],
                "parameters": GREEDY,
            }

        texts = []
        async with tritonclient.grpc.aio.InferenceServerClient(addresses[1]) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None
                texts += texts_of(result)
        return texts

    assert "".join(asyncio.run(run())) == completion(over_grpc.url)
