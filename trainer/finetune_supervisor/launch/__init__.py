"""Process startup on a node: launcher, ranks, rendezvous, DNS lookup and user commands."""
