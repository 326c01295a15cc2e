"""Entry point of `python -m finetune_cli`, for environments without the `finetune` command."""

from finetune_cli.app import main

if __name__ == "__main__":
    main()
