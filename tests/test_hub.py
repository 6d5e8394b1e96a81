"""Models by org/name: from the Hub's cache on disk as it is laid out there, and from a Hub of a few lines on this
machine, which says what it was asked for."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from command import call
from safetensors.torch import load_file

from eps_core.decode.heads import model_fingerprint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "org/tiny-model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded model beside which lies what nobody needs to fetch."""
    unneeded = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "original/params.json", "tokenizer.model")
    files: dict[str, Any] = {
        "tokenizer_config.json": {"chat_template": "{{ messages[0].content }}!"},
        "special_tokens_map.json": {"bos_token": "<s>"},
    }
    files |= dict.fromkeys(unneeded, b"not needed")
    return tiny_models.changed(tmp_path_factory.mktemp("model") / "files", "llama2-bf16-sharded", files=files)


def cached(model: Path, cache: Path, **refs: str) -> dict[str, str]:
    """The environment of a machine without network, in whose cache the model lies as huggingface_hub lays it out."""
    home = cache / "models--org--tiny-model"
    for folder in ("refs", "blobs", f"snapshots/{COMMIT}"):
        (home / folder).mkdir(parents=True)
    for file in model.glob("*.*"):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, home / "blobs" / digest)
        (home / "snapshots" / COMMIT / file.name).symlink_to(Path("../../blobs") / digest)
    for name, commit in ({"main": COMMIT} | refs).items():
        (home / "refs" / name).write_text(commit)
    return os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("name", [NAME, f"{NAME}@main", f"{NAME}@v1.0", f"{NAME}@{COMMIT}"])
def test_a_cached_model_runs_without_a_network(name: str, model: Path, tmp_path: Path) -> None:
    environment = cached(model, tmp_path / "cache", **{"v1.0": COMMIT})
    common = ("--prompt", "abc", "--max-new-tokens", 4, "--backend", "numpy", "--metrics", tmp_path / "m.jsonl")
    done = call("run", "--model", name, *common, env=environment, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["model"] == name
    here = json.loads(call("run", "--model", model, *common).stdout.splitlines()[-1])
    assert result["tokens"] == here["tokens"]


def test_every_command_takes_a_name(model: Path, tmp_path: Path) -> None:
    environment = cached(model, tmp_path / "cache")
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night. " * 20)
    given = ("--model", NAME, "--backend", "numpy")
    source = (*given, "--text", text, "--context", 64)
    retrieval = ("--eps-method", "box", "--eps-heads", "retrieval", "--eps-head-policy", "policy.json")
    for args in (
        ("info", "--model", NAME),
        ("capture", *source, "--steps", 2, "-o", "c.safetensors"),
        ("calibrate", *source, "--steps", 2, "--sink-tokens", 2, "--recent-tokens", 8, "-o", "policy.json"),
        ("run", *given, "--prompt", "xyz", "--max-new-tokens", 2, *retrieval),
        ("evaluate", *source, "--tasks", "none", "--samples", 1, "--text-steps", 2, "--eps-method", "box"),
    ):
        done = call(*args, env=environment, cwd=tmp_path)
        assert done.returncode == 0, (args, done.stderr)
    assert json.loads((tmp_path / "policy.json").read_text())["fingerprint"] == model_fingerprint(model)


def test_a_folder_comes_before_a_name(model: Path, tmp_path: Path) -> None:
    environment = cached(model, tmp_path / "cache")
    (tmp_path / "org").mkdir()
    other = tiny_models.save_model("qwen2-tied", tmp_path / NAME)
    done = call("info", "--model", NAME, env=environment, cwd=tmp_path)
    shape = json.loads(done.stdout.splitlines()[-1])["shape"]
    assert shape["context"] == json.loads((other / "config.json").read_text())["max_position_embeddings"]
    (tmp_path / "org" / "file").write_text("x")
    done = call("info", "--model", "org/file", env=environment, cwd=tmp_path)
    assert refused(done, "org/file is a file, not a directory")


def refused(done: subprocess.CompletedProcess, *says: str) -> bool:
    """Whether a command said one line, with all of it, and ended with 2."""
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    for part in says:
        assert part in done.stderr, done.stderr
    return True


@pytest.mark.parametrize("name", ["other/model", f"{NAME}@v2", "a/b/c", "-x/y", "org/name@", "~/model"])
def test_what_is_not_cached_is_one_line_offline(name: str, model: Path, tmp_path: Path) -> None:
    environment = cached(model, tmp_path / "cache")
    done = call("run", f"--model={name}", "--prompt", "abc", env=environment, cwd=tmp_path)
    fix = (
        "HF_HUB_OFFLINE is set: unset it"
        if name in ("other/model", f"{NAME}@v2")
        else "is no directory: give the folder"
    )
    assert refused(done, fix, name.partition("@")[0])


def test_a_snapshot_without_its_weights_is_one_line(model: Path, tmp_path: Path) -> None:
    environment = cached(model, tmp_path / "cache")
    for link in (tmp_path / "cache").rglob("model-0000*"):
        link.unlink()
    assert refused(call("run", "--model", NAME, "--prompt", "abc", env=environment), "shard", "is missing")
    assert call("info", "--model", NAME, env=environment).returncode == 0


# A Hub


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's protocol as fetching a snapshot takes: revisions, the list of files, files."""

    protocol_version = "HTTP/1.1"
    files: Path
    fault: tuple[int, str] | None = None  # of every answer about the repository, or of its files
    fault_of_files = False
    asked: list[str]

    def log_message(self, *args: object) -> None:
        pass

    def _say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        is_file = "/resolve/" in self.path
        if self.fault and is_file == self.fault_of_files:
            return self._say(self.fault[0], X_Error_Code=self.fault[1], X_Error_Message="refused here")
        if is_file:
            file = self.files / self.path.split(f"/resolve/{COMMIT}/")[1]
            content = file.read_bytes()
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            return self._say(200, content, ETag=etag, X_Repo_Commit=COMMIT)
        names = sorted(str(file.relative_to(self.files)) for file in self.files.rglob("*") if file.is_file())
        if "/tree/" in self.path:
            tree = [
                {"type": "file", "path": name, "oid": hashlib.sha1((self.files / name).read_bytes()).hexdigest()}
                | {"size": (self.files / name).stat().st_size}
                for name in names
            ]
            return self._say(200, json.dumps(tree).encode(), Content_Type="application/json")
        info = {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
        return self._say(200, json.dumps(info).encode(), Content_Type="application/json")

    do_HEAD = do_GET


@pytest.fixture
def hub(model: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[type[Hub], dict[str, str]]]]:
    """(the Hub, the environment in which it is the Hub) of a fault."""
    servers = []

    def start(**faults: object) -> tuple[type[Hub], dict[str, str]]:
        handler = type("Served", (Hub,), {"files": model, "asked": [], **faults})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        address = f"http://127.0.0.1:{server.server_port}"
        more = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        return handler, environment | more | {"HF_TOKEN": "", "HF_HUB_DISABLE_XET": "1"}

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_only_what_is_needed_is_fetched(hub: Callable, model: Path, tmp_path: Path) -> None:
    _, environment = hub()
    snapshot = tmp_path / "cache" / "models--org--tiny-model" / "snapshots" / COMMIT
    small = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    small |= {"special_tokens_map.json", "model.safetensors.index.json"}
    done = call("info", "--model", NAME, env=environment)
    assert done.returncode == 0, done.stderr
    assert {file.name for file in snapshot.iterdir()} == small
    args = ("run", "--model", NAME, "--backend", "numpy", "--prompt", "abc", "--max-new-tokens", 2)
    done = call(*args, env=environment)
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout.splitlines()[-1])  # progress goes to stderr
    shards = {file.name for file in model.glob("model-*.safetensors")}
    assert len(shards) > 2 and {file.name for file in snapshot.iterdir()} == small | shards
    # and now it is there
    again = call(*args, env=environment | {"HF_HUB_OFFLINE": "1"})
    assert again.returncode == 0 and not again.stderr, again.stderr


def pickled(tmp_path: Path, *names: str) -> Path:
    """A model whose weights are PyTorch's pickles: one, or shards with their index."""
    path = tiny_models.changed(tmp_path / "pickled", "llama2", "model.safetensors")
    weights = list(load_file(tiny_models.saved("llama2") / "model.safetensors").items())
    shards = {name: dict(weights[i :: len(names)]) for i, name in enumerate(names)}
    for name, shard in shards.items():
        torch.save(shard, path / name)
    if len(names) > 1:
        index = {"metadata": {}, "weight_map": {key: name for name, shard in shards.items() for key in shard}}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("names", [("pytorch_model.bin",), [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]])
def test_an_engine_gets_the_weights_that_it_reads(names: Sequence[str], hub: Callable, tmp_path: Path) -> None:
    served, environment = hub(files=pickled(tmp_path, *names))
    given = ("run", "--model", NAME, "--prompt", "abc", "--max-new-tokens", 2)
    done = call(*given, env=environment)
    assert done.returncode == 2 and f"only '{names[0]}', pickles of PyTorch: convert" in done.stderr, done.stderr
    assert not [path for path in served.asked if path.endswith(".bin")]
    done = call(*given, "--engine", "transformers", "--eps-method", "rq", env=environment)
    assert done.returncode == 0, done.stderr


def test_an_engine_gets_no_second_form_of_the_weights(hub: Callable, tmp_path: Path) -> None:
    served, environment = hub(files=tiny_models.changed(tmp_path / "both", "llama2", files={"pytorch_model.bin": b"x"}))
    given = ("run", "--model", NAME, "--prompt", "abc", "--max-new-tokens", 2, "--engine", "transformers")
    done = call(*given, "--eps-method", "rq", env=environment)
    assert done.returncode == 0, done.stderr
    assert not [path for path in served.asked if path.endswith(".bin")]


# the library tries again what a server fails at, after half a minute of waits in all
WITHOUT_WAITS = "import time; time.sleep = lambda seconds: None\nfrom eps_core.cli.main import main; main()"


@pytest.mark.parametrize(
    ("fault", "of_files", "says"),
    [
        ((401, "GatedRepo"), False, ("is restricted: accept its terms", "HF_TOKEN")),
        ((403, "GatedRepo"), True, ("is restricted: accept its terms", "HF_TOKEN")),
        ((401, "RepoNotFound"), False, ("neither a directory here nor a repository", "HF_TOKEN")),
        ((404, "RepoNotFound"), False, ("neither a directory here nor a repository", "check the name")),
        ((404, "RevisionNotFound"), False, ("has no revision 'v3'",)),
        ((500, ""), False, ("cannot be fetched from http://127.0.0.1", "500")),
        ((500, ""), True, ("cannot be fetched from http://127.0.0.1",)),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    fault: tuple[int, str], of_files: bool, says: tuple[str, ...], hub: Callable
) -> None:
    _, environment = hub(fault=fault, fault_of_files=of_files)
    args = [sys.executable, "-c", WITHOUT_WAITS, "run", "--model", f"{NAME}@v3", "--prompt", "abc"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: model {NAME}") and all(part in last for part in says), done.stderr


def test_a_network_that_is_not_there_is_one_line(hub: Callable) -> None:
    _, environment = hub()
    done = call("run", "--model", NAME, "--prompt", "x", env=environment | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert refused(done, f"model {NAME}", "cannot be fetched from http://127.0.0.1:9", "check the network")


def test_folders_need_no_hub(model: Path) -> None:
    """The library takes a while to import: a run of a folder, and --help, must not pay for it."""
    code = "import sys; sys.argv = ['eps-proto', 'info', '--model', sys.argv[1]]\n"
    code += "import eps_core.cli.main as m\ntry: m.main()\nfinally: print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"adapter_config.json": b'{"peft_type": "LORA"}'}, ("LORA adapter", "no model of its own")),
        ({"model-Q4_K_M.gguf": b"GGUF"}, ("config.json is missing", "'model-Q4_K_M.gguf'", "GGUF")),
        ({"config.json": b"{}", "adapter_config.json": b"{}"}, ("adapter", "beside base weights")),
        ({"config.json": b'{"model_type": "gpt2"}', "model.safetensors": b"weights"}, ("model_type 'gpt2'",)),
    ],
)
def test_a_repository_of_something_else_is_named_before_its_weights_come(
    names: dict[str, bytes], says: tuple[str, ...], hub: Callable, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    for name, content in names.items():
        (tmp_path / "other" / name).write_bytes(content)
    served, environment = hub(files=tmp_path / "other")
    done = call("run", "--model", NAME, "--prompt", "abc", env=environment)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and all(part in last for part in says), last
    assert not [path for path in served.asked if path.endswith((".safetensors", ".gguf"))]
