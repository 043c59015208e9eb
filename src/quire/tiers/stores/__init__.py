"""Where records outlive the process: one backend per file, all behind `quire.tiers.store.Store`."""
