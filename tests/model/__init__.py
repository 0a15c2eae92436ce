"""The reference model of the ledger, the content oracle, and a driver that holds the manager to both."""
