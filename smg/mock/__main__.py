import sys

from smg.mock.command import main

sys.exit(main())
