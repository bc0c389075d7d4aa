"""Made film reviews: short, random, the same in every run, and without any download.

A review opens with a neutral sentence and then has three or five opinions, most of them on the side of its label. An opinion
names an aspect of the film ("the plot", "the music") and rates it with an adjective. One in 16 is negated ("hardly dull"),
so that the adjective means the opposite. Some adjectives are rare, and every 33rd label is wrong, as with real annotators.
"""

import random

NEGATED, WRONG_EVERY = 1 / 16, 33
OPENINGS = [
    "i saw it with {name} on a {day} .",
    "{name} lent me the disc last {day} .",
    "the trailer had made me curious .",
    "this is the third film by {name} .",
    "a {day} evening , and nothing else was on .",
    "it is based on a novel by {name} .",
    "my {relative} and i watched it twice .",
    "{name} plays a detective from the north .",
]
NAMES = "anna carter dexter elena garcia hannah ibsen jones keller lopez miller novak olsen perry quinn ruiz"
RELATIVES = "aunt brother cousin daughter father mother sister son"
DAYS = "monday tuesday wednesday thursday friday saturday sunday winter summer rainy"
ASPECTS = (
    "acting cast camera dialogue direction ending editing humour idea lighting "
    "music opening pace plot script setting soundtrack story style title"
)
VERBS = "was is seemed felt became stayed"
DEGREES = ["", "", "", "very ", "rather ", "quite ", "truly ", "at times "]
NEGATIONS = ["not ", "never ", "hardly ", "far from ", "anything but "]
LINKS = [" . the ", " . the ", " and the ", " , while the ", " , but the ", " . to me the "]
GOOD = (
    "good great wonderful moving funny clever fresh superb charming warm gripping elegant honest bright witty thrilling lovely "
    "rich subtle inspired splendid tender vivid brilliant graceful touching sharp stunning lively delightful masterly poetic"
)
BAD = (
    "bad poor awful boring dull clumsy stale dreadful annoying cold tedious ugly false bland silly lifeless nasty "
    "empty crude lazy pointless harsh vague terrible stiff shallow blunt hideous sleepy painful amateurish wooden"
)


def pick(words: str, rng: random.Random) -> str:
    return rng.choice(words.split())


def opinion(is_good: bool, rng: random.Random) -> str:
    """Return an opinion of one aspect; the first adjectives of a list are the most frequent."""
    is_negated = rng.random() < NEGATED
    adjectives = (GOOD if is_good != is_negated else BAD).split()
    adjective = adjectives[int(len(adjectives) * rng.random() ** 2)]
    return f"{pick(ASPECTS, rng)} {pick(VERBS, rng)} {rng.choice(NEGATIONS if is_negated else DEGREES)}{adjective}"


def make_review(is_good: bool, rng: random.Random) -> str:
    number = rng.choice([3, 5])
    against = rng.randint(0, number // 2)
    sides = [is_good] * (number - against) + [not is_good] * against
    rng.shuffle(sides)
    names = {"name": pick(NAMES, rng), "day": pick(DAYS, rng), "relative": pick(RELATIVES, rng)}
    text = rng.choice(OPENINGS).format(**names) + " the " + opinion(sides[0], rng)
    for side in sides[1:]:
        text += rng.choice(LINKS) + opinion(side, rng)
    return text + " ."


def make_reviews(number: int) -> list[tuple[str, int]]:
    """Return pairs of a text and its label: 1 for a good review, 0 for a bad one."""
    rng = random.Random(0)
    texts = [make_review(index % 2 == 1, rng) for index in range(number)]
    return [(text, (index + (index % WRONG_EVERY == 0)) % 2) for index, text in enumerate(texts)]
