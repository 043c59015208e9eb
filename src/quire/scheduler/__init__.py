"""Who runs next: requests, queues, policies, batches."""
