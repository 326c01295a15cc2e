"""Entry point `python -m finetune_cli`, for environments in which the `finetune` command is not installed."""

from finetune_cli.app import main

if __name__ == "__main__":
    main()
