"""The head that comes with the bundled model: as many of its drafts are right as its card says, nearly."""

from __future__ import annotations

from quire.counters import plain
from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.models.hf import load_model
from quire.models.tokenizer import load_tokenizer
from quire.scheduler.sampling_params import SamplingParams
from tests.engine.running import AMPLE, run

SUBJECTS = (
    *("Mr. Darcy", "the weather", "Emma", "the ball", "Mrs. Bennet", "Captain Wentworth", "the letter", "Miss Bates"),
    *("Elinor", "the house", "Mr. Knightley", "Anne", "the carriage", "Lady Catherine", "Marianne", "the morning"),
    *("Fanny", "Sir Thomas", "the garden", "Catherine"),
)
PARAMS = SamplingParams(temperature=0, max_tokens=32)
HEAD = {"method": "eagle", "model": "quire-bundled-eagle", "num_speculative_tokens": 3}


def test_most_first_drafts_are_right() -> None:
    tokenizer = load_tokenizer("quire-bundled")
    asked = [[1, 3, *tokenizer.encode(f"Tell me about {subject}."), 5, 4] for subject in SUBJECTS]
    model = load_model("quire-bundled", dtype="float32")
    settings = {"model": "quire-bundled", "kv_memory": AMPLE, "max_model_len": 256}
    expected = run(EngineCore(engine_config(**settings), model=model), asked, PARAMS)
    core = EngineCore(engine_config(**settings, speculative_config=HEAD), model=model)
    assert core.speculator is not None
    core.speculator._governor = None
    assert run(core, asked, PARAMS) == expected
    found = plain(core.speculator.counted())
    assert found["accepted_tokens_per_position"][0] > 0.55 * found["drafts"]
    assert found["accepted_tokens"] > 0.4 * found["draft_tokens"]
