"""`make demo`, or `python -m examples.demo [--scene plain|window|recurrent|tiers] [--turns N] [--json]`."""

from examples.demo.scenes import app

app()
