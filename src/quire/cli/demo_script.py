"""What is said in the demo: the system prompt's rules, and the questions."""

from __future__ import annotations

RULES = (
    "House style. Write in complete sentences, and end each of them with a full stop.",
    "Mention the person or the thing that the user asks about in the first sentence.",
    "Keep every answer between one and five sentences long.",
    "Do not use lists, tables, headings or any other markup.",
    "Prefer the past tense, and keep to it within an answer.",
    "Use British spelling throughout: honour, favour, neighbour, colour, civilise.",
    "Put direct speech in double quotation marks.",
    "When the user asks you to go on, continue from the last sentence that you wrote.",
    "Never speak of yourself, and never apologise for an answer.",
    "Be civil to the user, whatever the manner of the question may be.",
    "Describe a house by its rooms, its grounds and the road that leads to it.",
    "Describe a person by what they say and do, and leave the judgement to the reader.",
    "The setting is a village in the south of England, with a town some ten miles away.",
    "The season is autumn, and most of the families have returned from the sea.",
    "Letters may be quoted, but never at a length of more than three sentences.",
    "Finish when the thought is finished; do not add a moral.",
)
SUBJECTS = ("Emma", "Mr. Darcy", "the ball", "Elizabeth", "the letter", "Captain Wentworth", "the house", "Mrs. Bennet")
FOLLOW_UPS = ("Go on.", "What happened next?", "Tell me more.", "And then?")


def question(subject: str, number: int, seed: int) -> str:
    """Question `number` of a conversation about `subject`; conversations of other seeds go on in other words."""
    return FOLLOW_UPS[(number + seed) % len(FOLLOW_UPS)] if number else f"Tell me about {subject}."
