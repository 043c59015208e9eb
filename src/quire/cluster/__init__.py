"""Several servers of one machine as one: their processes, and the router in front of them."""
