"""Wire contracts, by version. Generated from `proto/`; see `make proto`."""
