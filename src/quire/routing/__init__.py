"""One HTTP endpoint in front of several servers: which of them gets a request, and what happens when it ends."""
