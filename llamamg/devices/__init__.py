"""What the devices of this machine can do: speed, hops between them, time of each stage, and the split that balances them."""
