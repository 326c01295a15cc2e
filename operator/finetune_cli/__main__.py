"""`python -m finetune_cli`, where the command is not installed."""

from finetune_cli.app import main

if __name__ == "__main__":
    main()
