"""Several tokens a step: who proposes them, which of them are right, and how many are worth their time."""
