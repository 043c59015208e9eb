"""Math on tensors: attention over paged pools, and writes into them. No ids are allocated here and no model is known."""
