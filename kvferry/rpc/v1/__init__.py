"""Generated stubs of `proto/kvferry/rpc/v1/*.proto`. Do not edit; run `make proto`."""
