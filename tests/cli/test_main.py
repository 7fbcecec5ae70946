"""The command line as people use it: a process, its two outputs, its status, a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.cli.commands import repl
from ridgeline.model.hub.short_names import SHORT_NAMES
from tests.engine.test_llm import write_model
from tests.waiting import PATIENCE_S, started

RIDGELINE = Path(sys.executable).parent / "ridgeline"


def ridgeline(
    *arguments: str, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(RIDGELINE), *arguments], input=stdin, capture_output=True, text=True,
        encoding="utf-8", env=os.environ | environment, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["run"], 2, "model"),
        (["run", "smollm2", "x", "--no-such-flag"], 2, "no-such-flag"),
        (["run", "smollm2", "x", "--policy", "fair"], 2, "splitfuse"),
        (["run", "smollm2", "x", "--block-size", "0"], 2, "--block-size is 0"),
        (["run", "smollm2", "x", "--temperature", "-1"], 2, "temperature is -1"),
        (["run", "smolm2", "x"], 1, "did you mean 'smollm2'"),
        (["run", "/no/such/file.gguf", "x"], 1, "/no/such/file.gguf"),
        (["pull", "../no-such-model"], 1, "../no-such-model"),
        (["explain", "no.jsonl"], 1, "ridgeline: no.jsonl: No such file or directory"),
    ],
)
def test_errors_are_short_and_have_a_status(arguments: list[str], status: int, words: str) -> None:
    done = ridgeline(*arguments)
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


@pytest.mark.parametrize("command", [[], ["run"], ["bench"], ["bench", "offline"]])
def test_h_is_help(command: list[str]) -> None:
    short, long = ridgeline(*command, "-h"), ridgeline(*command, "--help")
    assert (short.returncode, short.stdout) == (0, long.stdout)


def test_a_value_that_is_no_choice_gets_the_choices_and_no_jargon() -> None:
    for command in (["run"], ["bench", "offline"]):
        done = ridgeline(*command, "smollm2", "--dtype", "q4")
        assert done.returncode == 2
        assert "Invalid value for '--dtype' (env var: 'RIDGELINE_DTYPE')" in done.stderr
        assert ": 'q4' is not one of 'auto', 'f32'" in done.stderr


@pytest.mark.parametrize(
    ("flag", "value", "kind"),
    [("--port", "80 80", "a whole number"), ("--max-temperature", "warm", "a number")],
)
def test_a_value_that_is_no_number_is_named(flag: str, value: str, kind: str) -> None:
    name = "RIDGELINE_" + flag[2:].replace("-", "_").upper()
    for done in (
        ridgeline("serve", "smollm2", flag, value),
        ridgeline("serve", "smollm2", **{name: value}),
    ):
        assert done.returncode == 2
        assert f"'{flag}' (env var: '{name}'): {value!r} is not {kind}\n" in done.stderr


def test_debug_shows_the_traceback() -> None:
    done = ridgeline("run", "smolm2", "x", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("module", ["ridgeline.cli.main", "typer", "numpy", "tokenizers"])
def test_ctrl_c_while_the_program_still_imports_ends_it_quietly(
    module: str, tmp_path: Path
) -> None:
    """The signal comes as ``module`` is looked for, so at the same point on any machine."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import os, signal, sys

class Interrupter:
    @staticmethod
    def find_spec(name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter)
"""
    )
    done = subprocess.run(
        [str(RIDGELINE), "run", "smolm2", "x"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("raise MemoryError", "MemoryError"),
        (
            'raise ImportError("a page\\nof words") from OSError("failed to map segment")',
            "failed to map segment",
        ),
    ],
)
def test_too_little_memory_to_import_the_program_is_one_line(
    tmp_path: Path, failure: str, words: str
) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text(failure)
    done = ridgeline("run", "smollm2", "hi", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, f"ridgeline: it cannot start: {words}\n")
    assert "Traceback" in ridgeline("--debug", "list", PYTHONPATH=str(tmp_path)).stderr


def test_ctrl_c_while_kernels_compile_says_what_is_next(tmp_path: Path) -> None:
    command = [str(RIDGELINE), "run", str(write_model(tmp_path / "tiny")), "x", "--raw"]
    environ = os.environ | {"RIDGELINE_HOME": str(tmp_path / "home")}
    with started(command, env=environ, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while "compiling kernels" not in (line := process.stderr.readline()):
            assert line, "it ended"
        process.send_signal(signal.SIGINT)
        words = process.stderr.read()
    assert words == "stopped: the next start compiles the missing kernels\n"
    assert process.returncode == 130


def test_a_shells_wish_to_ignore_ctrl_c_is_kept() -> None:
    ignore = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    main = "from ridgeline.__main__ import main; sys.argv[1:] = ['--version'];"
    check = "assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN"
    code = f"{ignore}{main}\ntry: main()\nexcept SystemExit: {check}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("home", ["/proc/nowhere", os.devnull])
def test_a_home_that_cannot_be_written_is_named(home: str) -> None:
    pulled = ridgeline("pull", "smollm2", RIDGELINE_HOME=home)
    assert pulled.returncode == 1
    assert re.fullmatch(rf"ridgeline: .*{home}/models .*RIDGELINE_HOME.*\n", pulled.stderr)
    doctor = ridgeline("doctor", RIDGELINE_HOME=home)
    assert f"{home} cannot be written" in doctor.stdout
    assert "RIDGELINE_HOME" in doctor.stdout


def test_where_kernels_cannot_be_kept_it_is_said_once(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from ridgeline import LLM
        for _ in range(2):
            with LLM(sys.argv[1], kv_cache_memory="1MiB", threads=1) as llm:
                print(len(llm.generate([[40, 41]])))
    """
    home = tmp_path / "a file"
    home.touch()
    done = subprocess.run(
        [sys.executable, "-c", code, str(write_model(tmp_path / "random"))],
        env=os.environ | {"RIDGELINE_HOME": str(home)},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.stdout == "1\n1\n", done.stderr
    assert done.stderr.count(f"neither kernels nor packed weights can be kept in {home}") == 1
    assert "RIDGELINE_HOME" in done.stderr
    assert "(once)" not in done.stderr


def test_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + bytes(7))
    done = ridgeline("run", str(path), "x")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "damaged.gguf" in done.stderr


def test_version_models_and_doctor() -> None:
    assert re.fullmatch(r"ridgeline \d+\.\d+\.\d+\n", ridgeline("--version").stdout)
    assert "smollm2" in ridgeline("list").stdout
    doctor = ridgeline("doctor")
    assert doctor.returncode == 0
    for fact in ("processor", "instruction sets", "memory", "backend"):
        assert fact in doctor.stdout


def test_doctor_as_json(tmp_path: Path) -> None:
    done = ridgeline("doctor", str(write_model(tmp_path / "tiny")), "--json")
    found = json.loads(done.stdout)
    assert {"processor", "memory", "backend"} <= {fact["name"] for fact in found["facts"]}
    assert found["memory"]["resident_bytes"] > 1 << 20
    assert isinstance(found["problems"], list)


@pytest.mark.parametrize(
    ("word", "instead"), [("version", "ridgeline --version"), ("stop", "Ctrl-C")]
)
def test_a_command_of_other_programs_says_what_there_is_instead(word: str, instead: str) -> None:
    done = ridgeline(word)
    assert done.returncode == 2
    assert done.stderr.startswith(f"ridgeline: there is no command {word!r}: {instead}")


def test_a_list_cuts_no_name_on_a_narrow_screen(tmp_path: Path) -> None:
    name = "qwen2.5-coder:0.5b"
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / SHORT_NAMES[name].file_name).touch()
    shown = ridgeline("list", RIDGELINE_HOME=str(tmp_path), COLUMNS="30").stdout
    table = shown.partition("not here")[0]
    assert name in "".join(row.split(" ")[0] for row in table.splitlines())


def test_doctor_says_what_a_model_takes_in_memory(tmp_path: Path) -> None:
    done = ridgeline("doctor", str(write_model(tmp_path / "tiny")), COLUMNS="80")
    assert done.returncode == 0
    rows = {row[0]: row[1:] for row in map(str.split, done.stdout.splitlines()) if row}
    may_take, loaded, after = (float(cell.replace(",", "")) for cell in rows["kv_cache"][:3])
    assert loaded == 0 < after < may_take
    assert {"weights.mlp", "weights.embedding", "scratch.local_memory", "kernels"} <= set(rows)
    assert rows["process.other"][-1] == "measured"
    assert "The KV cache takes memory as its blocks are first used" in done.stdout
    missing = ridgeline("doctor", "smolm2")
    assert (missing.returncode, "did you mean 'smollm2'" in missing.stderr) == (1, True)


@pytest.mark.engine
def test_run_answers_on_standard_output_alone() -> None:
    arguments = ("--raw", "--temperature", "0", "--max-tokens", "4")
    done = ridgeline("run", "smollm2", "The capital of France is", *arguments)
    assert done.returncode == 0
    assert done.stdout == " Paris.\n\n\n"
    assert re.fullmatch(r"(Loading SmolLM2.*\n)?(compiling kernels \(once\)\n)?", done.stderr)


@pytest.mark.engine
def test_each_run_draws_a_seed_that_repeats_it() -> None:
    def run(*arguments: str) -> tuple[str, str]:
        """Return the answer and the seed that stands behind it."""
        prompt = ("run", "smollm2", "Once upon a time", "--raw", "--max-tokens", "12")
        with Terminal(*prompt, *arguments) as terminal:
            terminal.wait_for(r"\[\d+ tokens?[^\]]*\]")  # an answer may end before its 12th
            assert terminal.status() == 0
        text, remark = re.split(r"\[\d+ tokens?", terminal.seen)[-2:]
        found = re.search(r"seed\s+(\d+)\]", remark)
        answer = text.rpartition("\x1b[2K")[2]  # behind the bar
        return answer, found[1] if found else ""

    hot = ("--temperature", "1.5")
    first, second = run(*hot), run(*hot)
    assert first[1] != second[1]
    assert first[0] != second[0]
    assert run(*hot, "--seed", first[1]) == first
    assert not run("--temperature", "0")[1]  # where it changes nothing


@pytest.mark.engine
def test_the_short_name_samples_as_its_card_does() -> None:
    with LLM("smollm2", kv_cache_memory="16MiB") as llm:
        assert llm.default_params() == SamplingParams(temperature=0.2, top_p=0.9)
        assert llm.default_params(temperature=1).temperature == 1
    with LLM(llm.path, kv_cache_memory="16MiB") as llm:  # a file alone has no card
        assert llm.default_params() == SamplingParams()


@pytest.mark.engine
def test_run_takes_a_piped_prompt_and_writes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    done = ridgeline(
        "run", "smollm2", "--temperature", "0", "--max-tokens", "8", "--trace", str(trace),
        stdin="Say hello.",
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.strip()
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [record["type"] for record in records[:2]] == ["engine", "step"]
    assert records[-1]["type"] == "request"
    again = ridgeline("replay", str(trace))
    assert (again.returncode, again.stderr) == (0, "")
    assert "equal  8 steps, 1 request: all decisions are the same" in again.stdout


def test_replay_names_the_first_decision_that_differs(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    with LLM(write_model(tmp_path / "tiny"), trace=trace, backend="reference") as llm:
        llm.generate(
            [[40, 41], [42, 43, 44]], SamplingParams(max_tokens=5, ignore_eos=True), progress=False
        )
    lines = trace.read_text().splitlines()
    changed = json.loads(lines[3]) | {"waits": [[[1, 0], "blocks"]]}
    trace.write_text("\n".join([*lines[:3], json.dumps(changed), *lines[4:]]))
    different = ridgeline("replay", str(trace))
    assert different.returncode == 1
    assert "2 steps, 2 requests were equal; then step 2" in different.stdout
    assert re.search(r'waits +\[\[\[1, 0\], "blocks"\]\] +\[\]', different.stdout)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "does not describe an engine"),
        ("{}\nx\n", "line 1, is not a record of a trace"),
        ("x\n{}\n", "line 1, is not JSON"),
        ("[]", "not a trace"),
    ],
)
def test_replay_refuses_what_is_no_trace(tmp_path: Path, content: str, words: str) -> None:
    trace = tmp_path / "run.jsonl"
    trace.write_text(content)
    done = ridgeline("replay", str(trace))
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr


GREEDY = ("--raw", "--temperature", "0", "--max-tokens", "6")
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENCODED = pytest.param({"PYTHONIOENCODING": "ascii"}, marks=pytest.mark.full)


@pytest.mark.engine
@pytest.mark.parametrize("locale", [ASCII, ENCODED])
def test_a_locale_of_ascii_reads_all_and_shows_what_it_can(locale: dict[str, str]) -> None:
    prompt = "é è é è é è é"
    wanted = ridgeline("run", "smollm2", prompt, *GREEDY)
    assert not wanted.stdout.isascii()
    shown = wanted.stdout.encode("ascii", "replace").decode()
    for arguments, stdin in ((("smollm2", prompt), ""), (("smollm2",), prompt)):
        done = ridgeline("run", *arguments, *GREEDY, stdin=stdin, **locale)
        assert (done.returncode, done.stdout) == (0, shown), done.stderr


def test_an_argument_that_is_no_text_is_named() -> None:
    command: list[str | bytes] = [str(RIDGELINE), "run", "smollm2", b"caf\xe9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "'caf\\udce9' is not UTF-8" in done.stderr


@pytest.mark.engine
def test_standard_input_stands_behind_the_prompt() -> None:
    both = ridgeline("run", "smollm2", "The capital of", *GREEDY, stdin="France is")
    whole = ridgeline("run", "smollm2", "The capital of\n\nFrance is", *GREEDY)
    alone = ridgeline("run", "smollm2", "The capital of", *GREEDY, stdin=" \n")
    assert both.stdout == whole.stdout != alone.stdout
    assert both.returncode == whole.returncode == alone.returncode == 0


@pytest.mark.engine
def test_standard_input_that_stays_silent_is_not_waited_for_for_ever() -> None:
    command = [str(RIDGELINE), "run", "smollm2", "The capital of France is", *GREEDY]
    pipe = subprocess.PIPE
    with started(command, stdin=pipe, stdout=pipe, stderr=pipe) as silent:
        assert silent.wait(PATIENCE_S) == 0  # while its standard input is open
        assert silent.stdout is not None
        assert silent.stderr is not None
        assert silent.stdout.read().startswith(" Paris.")
        assert "nothing came on standard input" in silent.stderr.read()


@pytest.mark.parametrize("is_closed", [False, True])
def test_without_any_prompt_the_way_out_is_named(is_closed: bool) -> None:
    command = f"exec {RIDGELINE} run smollm2 " + ("<&-" if is_closed else "</dev/null")
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 2
    assert "give a PROMPT" in done.stderr
    assert "Traceback" not in done.stderr


def test_endless_input_is_refused() -> None:
    done = subprocess.run(
        f"yes | {RIDGELINE} run smollm2 x", shell=True, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "standard input has more than" in done.stderr


@pytest.mark.engine
def test_run_says_what_it_gave_up_for_memory() -> None:
    done = ridgeline(
        "run", "smollm2", "Hi", "--max-tokens", "2", "--kv-cache-memory", "8MiB",
        "--max-model-len", "4096",
    )  # fmt: skip
    assert done.returncode == 0
    assert re.search(r"note: .*--max-model-len", done.stderr)


@pytest.mark.engine
def test_too_long_a_prompt_names_the_numbers() -> None:
    done = ridgeline("run", "smollm2", "one two three four", "--raw", "--max-model-len", "4")
    assert done.returncode == 1
    assert re.search(r"4 tokens.*4 \(--max-model-len", done.stderr)


@pytest.mark.engine
def test_bench_offline_ends_with_one_json_document() -> None:
    arguments = ("--prompt-tokens", "8", "--new-tokens", "3", "--max-model-len", "64")
    done = ridgeline("bench", "offline", "smollm2", *arguments)
    assert done.returncode == 0
    result = json.loads(done.stdout.splitlines()[-1])
    greedy = {"single", "batch4", "batch16", "batch64"}
    sampled = {f"{name}_{how}" for name in greedy - {"batch4"} for how in ("t1", "k40")}
    assert set(result["median"]) == greedy | sampled
    assert all(shape["decode_tokens_per_s"] > 0 for shape in result["median"].values())


@pytest.mark.engine
def test_chat_keeps_the_conversation_and_ctrl_c_stops_an_answer() -> None:
    arguments = "run", "smollm2", "--temperature", "0", "--max-tokens", "4000"
    with Terminal(*arguments) as terminal:
        terminal.wait_for(">>> ")
        terminal.type("/help\n")
        terminal.wait_for(r"/clear[\s\S]*>>> ")  # what is typed earlier is echoed before it
        terminal.type("Write a very long story about the sea.\n")
        terminal.wait_for(r"sea\.\s+\S")  # of an answer far from its end
        terminal.interrupt()
        terminal.wait_for("stopped by you")
        terminal.wait_for(">>> ")
        terminal.type('"""What is\n')
        terminal.wait_for(r"\.\.\. ")
        terminal.type('2+2?"""\n')
        terminal.wait_for("complete]|length]")
        terminal.type("/sow\n")
        terminal.wait_for("there is no command /sow")
        assert "0/?" not in terminal.seen
        terminal.type("/exit\n")
        assert terminal.status() == 0


def test_ctrl_c_while_a_prompt_is_made_asks_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        path, text = Path("slow.gguf"), SimpleNamespace(can_chat=True)

        def stream(self, *_: object) -> None:
            raise KeyboardInterrupt

    texts = iter(["Hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(texts))
    repl.chat(cast(LLM, Slow()), SamplingParams())
    assert not list(texts)


class Terminal:
    """A ridgeline process on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(RIDGELINE, ["ridgeline", *arguments])
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self.fd, text.encode())

    def interrupt(self) -> None:
        os.write(self.fd, b"\x03")

    def wait_for(self, pattern: str) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.seen):
            left_s = end_s - time.monotonic()
            ready, _, _ = select.select([self.fd], [], [], max(0.0, left_s))
            if not ready:
                os.kill(self.pid, signal.SIGKILL)
                pytest.fail(f"{pattern!r} did not come; seen: {self.seen!r}")
            self.seen += os.read(self.fd, 4096).decode(errors="replace")

    def status(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
