"""What lies in a store is data: no loader of ours runs it, and no key leads out of the store."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_core.config import ConfigError
from forge_core.runs.record import load_run
from forge_core.store import CorruptObject, Store, StoreError, layout, open_store
from forge_core.weights.host_cache import keep_published

ROOT = Path(__file__).resolve().parents[2]
UNSAFE = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open"),
    *("torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "joblib.load", "dill.load", "cloudpickle.load"),
    *("eval", "exec", "dcp.FileSystemReader", "dcp.FileSystemWriter", "FileSystemReader", "FileSystemWriter"),
}
PRIVATE = {  # pipes between a process and its child
    *("forge_core/rewards/wire.py", "forge_core/processes/channel.py", "forge_core/services/cargo.py"),
}
IN_A_SANDBOX = "forge_core/sandbox/inside/"  # where code that nobody has read is run


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    for package in ("forge_core", "tasks", "flows"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call):
                    yield str(file.relative_to(ROOT)), node, ast.unparse(node.func)


def test_no_loader_that_can_run_code_is_called() -> None:
    found = {(file, node.lineno, name) for file, node, name in calls() if name in UNSAFE and file not in PRIVATE}
    found = {call for call in found if not (call[0].startswith(IN_A_SANDBOX) and call[2] == "exec")}
    assert found == set()
    assert {file for file, _, name in calls() if name == "pickle.loads"} == PRIVATE


def test_no_call_asks_for_pickles_remote_code_or_a_shell() -> None:
    for file, node, name in calls():
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        assert given.get("allow_pickle", "False") == "False", (file, node.lineno)
        assert given.get("shell", "False") == "False", (file, node.lineno)
        if name.endswith(".from_pretrained"):
            assert given.get("trust_remote_code") == "False", (file, node.lineno)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that exists once a planted pickle was read."""
    yield tmp_path / "it-ran"
    assert not (tmp_path / "it-ran").exists()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def test_the_bomb_is_one(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "went-off")))
    assert (tmp_path / "went-off").exists()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "weights.pt", ".metadata", "__0_0.distcp", "modeling.py", "x.npy"]
)
def test_a_file_that_may_hold_code_is_never_fetched_for_a_loader(store: Store, marker: Path, name: str) -> None:
    files = {"config.json": b"{}", name: pickle.dumps(Bomb(marker))}
    prefix = store.publish(layout.weights("r", 0, "a"), files, request="r").prefix
    with pytest.raises(CorruptObject, match=r"may hold code.*find out who wrote runs/r/weights/00000000-a/"):
        keep_published(store, prefix)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pickle_under_the_name_of_a_model_file_is_an_error_and_does_not_run(
    store: Store, marker: Path, tmp_path: Path, name: str
) -> None:
    import torch

    from forge_core.config.data_sections import ScratchModel
    from forge_core.models.scratch import create
    from forge_core.models.weights import build_model

    create(ScratchModel(vocabulary="01", hidden_size=32, intermediate_size=32, num_layers=1), 0, tmp_path / "model")
    files: dict[str, bytes] = {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()}
    files[name] = pickle.dumps(Bomb(marker))
    folder = keep_published(store, store.publish(layout.weights("r", 0, "a"), files, request="r").prefix)
    with pytest.raises(Exception, match=r"(?i)utf-8|json|safetensors|tokenizer|expected"):  # noqa: PT012
        build_model(folder, dtype=torch.float32, device="cpu")
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


@pytest.mark.engine
def test_a_pickle_in_a_checkpoint_is_an_error_and_does_not_run(marker: Path) -> None:
    from tests.runs.harness import advance, memory, new_run, reopened

    ctx = advance(new_run(memory(), "steps=1", "eval.prompts=0", "checkpoint.interval=1"), 1)
    ctx.close()
    entry = ctx.ledger.required(0)
    prefix = layout.checkpoint("tiny", 0, entry["attempt"])
    published = ctx.store.open_published(prefix)
    assert {name.rpartition(".")[2] for name in published.files} == {"safetensors", "json"}
    request = published.manifest.request
    planted = {name: published.read(name) for name in published.files}
    for name in planted:
        ctx.store.delete(f"{prefix}manifest.json")
        ctx.store.publish(prefix, {**planted, name: pickle.dumps(Bomb(marker))}, request=request)
        again = reopened(ctx)
        with pytest.raises(Exception, match=r"(?i)header|utf-8|json|expecting"):
            again.trainer.prepare(1)
        again.close()


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".hidden", "a b", "x" * 101, "", "a\n", "-x"])
def test_what_is_no_run_id_is_not_looked_for(store: Store, name: str) -> None:
    with pytest.raises(ConfigError, match="a run id is up to 100 letters"):
        load_run(store, name)


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "runs/../../x", "~/x", "a\\b", "a//b", "runs/./x", ".tmp/x"])
def test_keys_do_not_leave_the_store(store: Store, key: str) -> None:
    for act in (store.read, store.exists, store.delete, lambda k: store.put_new(k, b"x"), store.open_published):
        with pytest.raises(StoreError, match="is not a key"):
            act(key)


def test_symbolic_links_do_not_lead_out_of_the_store(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.json").write_text("{}")
    assert store.folder is not None
    (store.folder / "runs").mkdir()
    (store.folder / "runs" / "evil").symlink_to(outside)
    (store.folder / "runs" / "link.json").symlink_to(outside / "secret.json")
    for act in (
        store.read,
        store.exists,
        store.delete,
        lambda k: store.put_new(k, b"x"),
        lambda k: store.put_json(k, {}),
    ):
        for key in ("runs/evil/secret.json", "runs/link.json"):
            with pytest.raises(StoreError, match=r"leads out of the store, to .*/outside"):
                act(key)
    with pytest.raises(StoreError, match="leads out of the store"):
        store.list("runs/evil")
    assert (outside / "secret.json").read_text() == "{}"
    assert not [key for key in store.list("runs") if "evil" in key]


def test_the_store_itself_may_be_behind_a_link(store: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.folder)  # type: ignore[arg-type]
    linked = open_store(str(tmp_path / "link"))
    assert linked.put_new("a/b.json", b"x")
    assert store.read("a/b.json") == b"x"
    assert store.list("a") == ["a/b.json"]
