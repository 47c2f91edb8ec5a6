"""RULER: whole prompts that leave room for the answer, made by loops that end."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from pathlib import Path

import pytest
from student_helpers import student, teacher
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import tc.teacher
from tc.config import RulerConfig
from tc.errors import TCError
from tc.evaluate import ruler, run_ruler
from tc.evaluate.results import warn_beyond
from tc.teacher.untrained import byte_tokenizer

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-env installs it")
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from tc.evaluate import harness

with harness.quiet(), ruler._silent():
    from tc.evaluate import ruler_prompts
from lm_eval.tasks.ruler import prepare_niah, qa_utils, vt_utils

TINY = Path(tc.teacher.__file__).parent / "tiny" / "llama"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """1024 tokens: prompts take about twice as many as with a large vocabulary."""
    return AutoTokenizer.from_pretrained(TINY)


class Reader(harness.Scorer):
    """Answers with the first number of a needle in a part of the prompt; keeps what it is given."""

    begin = 0.0

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[str] = []

    def _model_generate(self, context, max_length, stop, **kwargs):
        self.seen += [self.tokenizer.decode(row, skip_special_tokens=True) for row in context]
        assert max_length <= self.max_length
        return context

    def generate_until(self, requests, disable_tqdm: bool = True) -> list[str]:
        super().generate_until(requests)
        prompts = [request.args[0] for request in requests]
        found = [re.search(r" is: ([-0-9a-f]+)\.", p[int(self.begin * len(p)) :]) for p in prompts]
        return [match[1] if match else "" for match in found]


class HalfReader(Reader):
    begin = 0.5


def scorer(tokenizer, length: int, kind=Reader, batch_size: int = 2) -> Reader:
    with harness.quiet():
        return kind(teacher("llama"), tokenizer, batch_size, max_length=length)


def fitting(tokenizer, task: str, length: int, **cfg):
    with harness.quiet(), ruler._silent():
        return ruler.fitting(
            scorer(tokenizer, length), tokenizer, task, length, RulerConfig(limit=4, **cfg), seed=3
        )


# ---- budget -------------------------------------------------------------------------------------

FITS = [(task, length) for task in ruler.MADE for length in (2048, 4096)]
FITS.remove(("ruler_cwe", 4096))


@pytest.mark.parametrize(("task", "length"), FITS)
def test_prompts_are_whole_and_leave_room_for_the_answer(task, length, tokenizer) -> None:
    loaded, reader = fitting(tokenizer, task, length), scorer(tokenizer, length)
    prompts = [request.args[0] for request in loaded.instances]
    answer = loaded.get_config("generation_kwargs")["max_gen_toks"]
    assert answer == ruler_prompts.ANSWER_TOKENS.get(task, 128)
    sizes = [len(tokenizer(prompt).input_ids) for prompt in prompts]
    assert length / 4 < max(sizes) <= length - answer
    for prompt, doc in zip(prompts, loaded.eval_docs, strict=True):
        assert prompt.endswith(doc["gen_prefix"]) and doc["input"] in prompt
        assert all(expected in doc["input"] for expected in doc["outputs"])
    reader.generate_until(loaded.instances)
    assert sorted(reader.seen) == sorted(prompts)


def test_lm_evals_own_documents_leave_no_room(tokenizer) -> None:
    """Wrong on purpose: what the prefix of the answer needs is not spared."""
    short, cut = scorer(tokenizer, 2048), 0
    for task in ("ruler_vt", "ruler_fwe", "niah_multikey_2"):
        order = ruler_prompts.Order(tokenizer, 2048, 0, 8)
        with harness.quiet(), harness.seeded(0), ruler._silent():
            docs = ruler_prompts.make(task, order)
            loaded = ruler._loaded(task, docs)
            loaded.build_all_requests()
        short.seen.clear()
        short.generate_until(loaded.instances)
        cut += sum(request.args[0] not in short.seen for request in loaded.instances)
    assert cut


def test_an_overflow_is_an_error(tokenizer, monkeypatch) -> None:
    make = ruler_prompts.make
    monkeypatch.setattr(
        ruler_prompts, "make", lambda task, o: make(task, dataclasses.replace(o, spare=-300))
    )
    with pytest.raises(TCError, match=r"after 6 tries a prompt of \d+ tokens and an answer of 50"):
        fitting(tokenizer, "ruler_fwe", 2048)


def test_the_seed_alone_says_what_is_asked(tokenizer) -> None:
    def asked(seed: int, task: str) -> list[str]:
        random.seed(id(object()))
        with harness.quiet(), ruler._silent():
            cfg, made = RulerConfig(limit=2), scorer(tokenizer, 2048)
            loaded = ruler.fitting(made, tokenizer, task, 2048, cfg, seed)
        return [request.args[0] for request in loaded.instances]

    for task in ("niah_multikey_3", "ruler_vt", "ruler_cwe"):
        assert asked(1, task) == asked(1, task) != asked(2, task)


# ---- loops that end -----------------------------------------------------------------------------


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("task", ["ruler_vt", "ruler_cwe", "ruler_fwe"])
def test_loops_end_on_a_small_vocabulary(task: str) -> None:
    """Each length is refused or kept to; nothing between the two goes on for ever."""
    tokenizer, fits = byte_tokenizer(), []
    for spare in range(0, 1024, 93):
        order = ruler_prompts.Order(tokenizer, 1024, spare, 2)
        try:
            with harness.seeded(spare), ruler._silent():
                fits.append(len(ruler_prompts.make(task, order)))
        except TCError as error:
            assert "eval.ruler.tasks" in str(error)
    assert fits == ([2] * len(fits) if task == "ruler_fwe" else []) and len(fits) < 11


@pytest.mark.timeout(60, method="thread")
def test_variable_tracking_ends_wherever_the_length_ends(tokenizer) -> None:
    """Around the shortest length that holds its example and ten sentences."""
    made = []
    for length in range(1024, 2048, 128):
        order = ruler_prompts.Order(tokenizer, length, 0, 2)
        try:
            with harness.seeded(length), ruler._silent():
                docs = ruler_prompts.make("ruler_vt", order)
            made.append(all(order.count(doc["input"]) < length for doc in docs))
        except TCError:
            made.append(False)
    assert made[-1] and made == sorted(made)


def test_lm_eval_alone_would_draw_for_ever(monkeypatch) -> None:
    """Wrong on purpose: what lm-eval allows for the example is less than the shortest takes."""
    tokenizer, draws = byte_tokenizer(), []
    draw = vt_utils.generate_input_output

    def counted(*args, **kwargs):
        draws.append(args)
        if len(draws) > 500:
            return vt_utils.TEMPLATE.format(context="", query=1, num_v=1), ["A"]
        return draw(*args, **kwargs)

    monkeypatch.setattr(vt_utils, "generate_input_output", counted)
    order = ruler_prompts.Order(tokenizer, 1024, 0, 1)
    with ruler._silent(), pytest.raises(TCError, match="ruler_vt does not fit in 1024 tokens"):
        ruler_prompts.make("ruler_vt", order)
    assert len(draws) < 6
    draws.clear()
    with harness.quiet(), ruler._silent():
        vt_utils.sys_vartrack_w_noise_random(tokenizer, 1, max_seq_length=500, incremental=5)
    assert len(draws) == 501


# ---- scores -------------------------------------------------------------------------------------


def directly(tokenizer, task: str, length: int, limit: int, kind) -> tuple[float, float]:
    """lm-eval's own task, which makes its own documents, and its own sum of the scores."""
    metadata = {"tokenizer": str(TINY), "max_seq_lengths": [length]}
    with harness.quiet(), harness.seeded(0), ruler._silent():
        folder = harness.TASKS_FOLDER / "ruler"
        manager = TaskManager(include_path=folder, include_defaults=False, metadata=metadata)
        loaded = manager.load([task])
        found = evaluate(scorer(tokenizer, length, kind), loaded, limit=limit, log_samples=True)
    values = [sample[str(length)] for sample in found["samples"][task]]
    mean = sum(values) / limit
    return mean, math.sqrt(mean * (1 - mean) / limit)


def test_scores_are_those_of_lm_eval_run_directly(tokenizer, monkeypatch) -> None:
    """A reader of the second half finds about every other needle, however it is asked."""
    want, error = directly(tokenizer, "niah_single_1", 1024, 100, HalfReader)
    monkeypatch.setattr(harness, "Scorer", HalfReader)
    cfg = RulerConfig(tasks=["niah_single_1"], lengths=[1024], limit=100)
    (got,) = run_ruler(teacher("llama"), tokenizer, cfg, seed=0)
    assert 0.2 < want < 0.8 and got.stderr == pytest.approx(error, rel=0.3)
    assert abs(got.value - want) < 3 * math.hypot(error, got.stderr)
    # Wrong on purpose: a reader of the whole prompt.
    monkeypatch.setattr(harness, "Scorer", Reader)
    (other,) = run_ruler(teacher("llama"), tokenizer, cfg, seed=0)
    assert other.value == 1.0 and other.value - want > 3 * error


def test_results_say_what_was_measured() -> None:
    told: list[tuple[int, int]] = []
    cfg = RulerConfig(tasks=["niah_single_1", "ruler_fwe"], lengths=[1024, 1536], limit=2)
    subject = student("llama", "even")
    results = run_ruler(subject, byte_tokenizer(), cfg, 0, lambda *x: told.append(x))
    assert [(r.task, r.context) for r in results] == [
        ("niah_single_1", 1024),
        ("ruler_fwe", 1024),
        ("niah_single_1", 1536),
        ("ruler_fwe", 1536),
    ]
    assert {(r.measure, r.metric, r.samples) for r in results} == {("ruler", "string_match", 2)}
    assert all(0 <= r.value <= 1 for r in results)
    assert told == [(i, 8) for i in range(1, 9)]


def test_all_that_cannot_be_made_is_told_before_a_prompt_is_answered(monkeypatch) -> None:
    monkeypatch.setattr(harness, "scores", lambda *args, **kwargs: pytest.fail("answered"))
    cfg = RulerConfig(tasks=["niah_single_1", "ruler_vt", "ruler_cwe"], lengths=[1024], limit=2)
    with pytest.raises(TCError) as error:
        run_ruler(teacher("llama"), byte_tokenizer(), cfg, seed=0)
    assert str(error.value).count("\n  - ") == 2
    assert "ruler_cwe does not fit in 1024 tokens" in str(error.value)


def test_a_longer_length_than_the_models_own_is_told_of(tokenizer, caplog) -> None:
    window = teacher("llama").config.max_position_embeddings
    for length in (window, window + 1):
        warn_beyond(teacher("llama"), "RULER", length)
    assert [str(window + 1) in record.getMessage() for record in caplog.records] == [True]


# ---- files --------------------------------------------------------------------------------------


def test_essays_hide_needles(tokenizer, tmp_path: Path, monkeypatch) -> None:
    draw = random.Random(0)
    words = ["one", "two", "walk", "old", "house", "river"]
    text = ". ".join(" ".join(draw.choices(words, k=9)) for _ in range(900))
    (tmp_path / "essay.txt").write_text(text)
    essay = str(tmp_path / "essay.txt")
    monkeypatch.setattr(ruler_prompts.nltk.data, "find", lambda name: name)
    monkeypatch.setattr(prepare_niah, "sent_tokenize", lambda text: text.split(". "))
    for task in ruler.ESSAY:
        loaded = fitting(tokenizer, task, 2048, essay=essay)
        for doc in loaded.eval_docs:
            assert all(expected in doc["input"] for expected in doc["outputs"])
            assert sum(word in doc["input"] for word in words) == len(words)
    with pytest.raises(TCError, match="less than the length 131072; give a longer text"):
        fitting(tokenizer, "niah_single_2", 131072, essay=essay)


def test_an_essay_needs_a_sentence_splitter(tmp_path: Path, monkeypatch) -> None:
    def find(name: str) -> str:
        raise LookupError(name)

    monkeypatch.setattr(ruler_prompts.nltk.data, "find", find)
    order = ruler_prompts.Order(byte_tokenizer(), 1024, 0, 1, essay=str(tmp_path / "none"))
    with pytest.raises(TCError, match=r"python -m nltk\.downloader punkt_tab"):
        ruler_prompts.make("niah_single_2", order)


def squad(path: Path, num_articles: int) -> str:
    """A file as SQuAD's, whose answers are words that are nowhere else."""
    draw = random.Random(1)
    articles = []
    for a in range(num_articles):
        paragraphs = []
        for p in range(3):
            name = f"answer{a}x{p}"
            words = [draw.choice(["red", "green", "blue", "grey"]) for _ in range(30)]
            qas = [
                {"question": f"which {a} {p}", "is_impossible": False, "answers": [{"text": name}]},
                {"question": "none", "is_impossible": True, "answers": []},
            ]
            paragraphs.append({"context": " ".join([*words, name]), "qas": qas})
        articles.append({"paragraphs": paragraphs})
    path.write_text(json.dumps({"data": articles}))
    return str(path)


def test_squad_is_read_as_lm_eval_reads_it(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "squad.json"
    squad(path, 5)
    monkeypatch.setattr(qa_utils, "download_json", lambda url: json.loads(path.read_text()))
    assert ruler_prompts.read_squad(path) == qa_utils.read_squad(f"the file {path}")
    path.write_text('{"data": 3}')
    with pytest.raises(TCError, match=r"is not SQuAD's dev-v2\.0\.json"):
        ruler_prompts.read_squad(path)


def test_questions_keep_their_passages(tokenizer, tmp_path: Path) -> None:
    whole = squad(tmp_path / "squad.json", 40)
    loaded = fitting(tokenizer, "ruler_qa_squad", 2048, squad=whole)
    assert all(doc["outputs"][0] in doc["input"] for doc in loaded.eval_docs)
    for num_articles, limit in ((2, 4), (40, 400)):
        small = squad(tmp_path / "small.json", num_articles)
        order = ruler_prompts.Order(tokenizer, 2048, 0, limit, squad=small)
        with pytest.raises(TCError, match=r"too few for .* give SQuAD's whole dev-v2\.0\.json"):
            ruler_prompts.make("ruler_qa_squad", order)


@pytest.mark.parametrize("kind", [tuple, list])
def test_passages_stay_in_their_places(kind, tokenizer, tmp_path: Path) -> None:
    """Wrong on purpose: a list, which lm-eval shuffles where a prompt can take all of it."""
    qas, docs = ruler_prompts.read_squad(Path(squad(tmp_path / "few.json", 4)))
    passages, length = kind(docs), 2 * len(tokenizer("\n\n".join(docs)).input_ids)
    with harness.quiet(), harness.seeded(0):
        qa_utils.generate_samples(tokenizer, passages, qas, max_seq_length=length, num_samples=1)
        made = [qa_utils.generate_input_output(i, 3, qas, passages) for i in range(len(qas))]
    assert all(answers[0] in text for text, answers in made) is (kind is tuple)


def test_what_a_task_lacks_is_said() -> None:
    assert list(ruler.left_out(RulerConfig(essay="a", squad="b"))) == [ruler.HOTPOT]
    assert set(ruler._tasks(RulerConfig())) == set(ruler.MADE)
    with pytest.raises(TCError, match=r"ruler_qa_squad needs eval\.ruler\.squad"):
        ruler._tasks(RulerConfig(tasks=["ruler_fwe", "ruler_qa_squad"]))
    assert set(ruler_prompts.NEEDLES) | set(ruler_prompts.MAKERS) == set(ruler.TASKS) - {
        ruler.HOTPOT
    }
