"""No tests here."""

collect_ignore_glob = ["*"]
