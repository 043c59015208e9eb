"""Math on tensors: attention over paged pools, and writes into them. No model is known here."""
