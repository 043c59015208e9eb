"""Math on tensors: attention over paged pools, and writes into them. Nothing is allocated, no model is known."""
