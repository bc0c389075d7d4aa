"""The measures of the prose: of docstrings, comments and messages, of pages, and of the names of tests."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from package import FUNCTIONS, PROJECT, Measure, Place, Source, repeated

PHRASES = {  # the first group of a pattern is counted
    "what": (r"(?:^|[.!?:]\s)\W*what\b(?=[^.!;]*\?)|\b(what)\b", "`what`, except where it begins a question"),
    "semicolon": (r"(;)(?=\s|$)", "semicolons"),
    "each": (r"\b(each)\b", "`each`"),
    "that_of": (r"\b((?:that|those)\s+of)\b", "`that of` and `those of`"),
    "those_that": (r"\b(those\s+that|one\s+that|those\s+who)\b", "`those that`, `one that` and `those who`"),
    "alone": (r"\b(alone)\b", "`alone`"),
    "left_out": (r"\b((?:left|leaves?|leaving)\s+out)\b", "`left out`, `leave out`, `leaves out` and `leaving out`"),
    "own": (r"\b(own)\b", "`own`, as in `its own` and `their own`"),
}
STRING_OR_COMMENT = re.compile(
    r'"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*"|'
    r"'(?:\\.|[^'\\\n])*'|(#.*(?:\n[ \t]*#.*)*)"
)
SENTENCE_END = re.compile(r"(?<=[.!?])[\"'`)\]]*\s+(?=[\"'`(\[]*[A-Z])|(?<=[.!?:])\s*\n|\n\s*\n")
CODE_BLOCK = re.compile(r"(?ms)^[ \t]*```.*?^[ \t]*```")

words_of = re.compile(r"\w+").findall
# A test's name has a finite verb if it has an auxiliary or past tense of these; a verb with -s, not after an article or a
# preposition; any word with -s before an object (`names every file`); or a plain verb after a word with -s (`ranks agree`).
AUXILIARIES = words_of("""
is are was were has have had does do did can cannot could may might must will would shall should isnt arent doesnt
dont wont went came gave took began became chose drew fell froze grew knew ran saw threw wrote broke rose
""")
VERBS = words_of("""
accept accumulate add agree allocate allow answer appear append apply arrive ask avoid become begin behave belong
break call cancel catch change check choose claim clear close come commit compile compute contain continue convert
copy count create cut decide delete depend die differ disable draw drift drop emit enable end equal exchange exclude
exist exit expand expect expire explain fail fall fetch fill find finish fit fix follow forbid forget forward free
gather get give go grow happen have hide hold ignore import include increase join keep kill know lead leave let lie
live load log lose make match matter mean measure meet merge miss move need occur open outlive override overwrite pass
pin preserve print produce push put raise reach read receive reduce refuse register reject release remain remove
rename repeat replace require reset resolve restart restore resume return reuse run save say scale see seem send set
share show skip sort split stand start stay stop sum support survive switch take tell train travel try update use
validate verify wait want warn weigh win work wrap write yield
""")
ARTICLES = words_of("""
a an the this these each every no any some its their his her our my two three several few many other another of in on
at by with without for from to into towards as and or before after between per over under within
""")
OBJECTS = words_of("a an the this it them itself its their each every no none nothing what once twice again")
SINGULAR = {form for verb in VERBS for form in (f"{verb}s", f"{verb}es", f"{verb[:-1]}ies")}

Text = tuple[str, int, str, bool]
"""A piece of prose: the path, the first line, the text, and whether it is a docstring."""


def prose_measures(package: list[Source], tests: list[Source]) -> Iterator[Measure]:
    yield from rates("package", (text for file in package for text in texts_of(file)))
    yield from rates("tests", (text for file in tests for text in texts_of(file)))
    yield from rates("docs", ((name, 1, without_code(page), False) for name, page in pages().items()))


def rates(scope: str, texts: Iterable[Text]) -> Iterator[Measure]:
    """Yield the rate of every phrase in these texts, and the mean length of a docstring's sentence if there are docstrings."""
    num_words = 0
    sentences: list[tuple[int, str, str]] = []
    found: dict[str, list[Place]] = {name: [] for name in PHRASES}
    for path, line, text, is_docstring in texts:
        num_words += len(text.split())
        for name, (pattern, _) in PHRASES.items():
            for match in (match for match in re.finditer(pattern, text, re.IGNORECASE) if match[1]):
                near = text[max(match.start() - 40, 0) : match.end() + 40].split()
                found[name].append((f"{path}:{line + text.count(chr(10), 0, match.start(1))}", " ".join(near)))
        parts = [sentence.split() for sentence in SENTENCE_END.split(text)] if is_docstring else []
        sentences += [(len(part), f"{path}:{line}", " ".join(part)[:80]) for part in parts if part]
    for name, places in found.items():
        counts = Counter(at.partition(":")[0] for at, _ in places)
        places.sort(key=lambda place: -counts[place[0].partition(":")[0]])
        rate = round(1000 * len(places) / num_words, 2)
        yield Measure(f"{scope}_{name}", f"{PHRASES[name][1]}, per 1,000 words.", places, rate, step=0.1)
    if sentences:
        longest = [(at, f"{number} words: {text}") for number, at, text in sorted(sentences, reverse=True)]
        mean = round(sum(number for number, *_ in sentences) / len(sentences), 2)
        yield Measure(f"{scope}_sentence", "Mean words of a sentence in docstrings.", longest, mean, step=0.1)


def texts_of(file: Source) -> Iterator[Text]:
    """Yield the docstrings, the comments, and the strings in raise statements."""
    for node in file.of(ast.Expr):
        if isinstance(getattr(node.value, "value", None), str):
            yield file.path, node.lineno, re.sub(r"(?m)^\s*(>>>|\.\.\.).*$", "", node.value.value), True
    for node in (part for statement in file.of(ast.Raise) for part in ast.walk(statement)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield file.path, node.lineno, node.value, False
    for match in STRING_OR_COMMENT.finditer(file.text):
        if match[1]:
            line = file.text.count("\n", 0, match.start()) + 1
            yield file.path, line, re.sub(r"(?m)^[ \t]*#", "", match[1]), False


def test_name_measures(tests: list[Source]) -> Iterator[Measure]:
    found: dict[str, list[Place]] = defaultdict(list)
    for file in tests:
        owners: list[Any] = [file.tree, *(node for node in file.of(ast.ClassDef) if node.name.startswith("Test"))]
        for node in (node for owner in owners for node in owner.body if isinstance(node, FUNCTIONS)):
            if node.name.startswith("test_"):
                found[node.name].append(file.at(node, node.name))
    verbless = [place for group in found.values() for place in group if not has_verb(place[1])]
    text = "Tests whose names have no finite verb, by the lists above; a verb right behind that/which/who/what is none."
    yield Measure("test_names_without_verb", text, verbless)
    yield Measure("test_names_repeated", "Names of tests that several files have.", repeated(found))


def has_verb(name: str) -> bool:
    words = name.split("_")
    for before, word, after in zip(words, words[1:], [*words[2:], ""], strict=False):
        is_plural, has_s = (re.search("[^s]s$", part) for part in (before, word))
        is_verb = word in SINGULAR or (has_s and after in OBJECTS) or (is_plural and word in VERBS)
        is_verb = is_verb and before not in ARTICLES and word not in ARTICLES
        if (word in AUXILIARIES or is_verb) and before not in ("that", "which", "who", "what"):
            return True
    return False


def page_measures() -> Iterator[Measure]:
    sized = sorted(((len(text.split()), f"{name}:1") for name, text in pages().items()), reverse=True)
    places = [(at, f"{number} words") for number, at in sized]
    text = "Words of the longest page of docs/ and the root, CHANGELOG aside."
    yield Measure("page_words", text, places, sized[0][0], step=50)
    num_long = sum(number > 2500 for number, _ in sized)
    yield Measure("pages_above_2500", "Pages of more than 2,500 words.", places[:num_long])
    rows = [(len(row), f"{name}:{i}") for name, text in pages().items() for i, row in enumerate(text.splitlines(), 1)]
    long = [(at, f"{size} characters") for size, at in sorted(rows, reverse=True) if size > 400]
    yield Measure("page_lines_above_400", "Lines of more than 400 characters in these pages.", long)


@cache
def pages() -> dict[str, str]:
    paths = sorted({*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")} - {PROJECT / "CHANGELOG.md"})
    return {path.relative_to(PROJECT).as_posix(): path.read_text() for path in paths}


def without_code(page: str) -> str:
    """Return a page with blank lines in the place of its code blocks."""
    return CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), page)
