"""The scheduler: requests, queues, policies and the steps that are made of them."""
