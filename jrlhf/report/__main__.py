"""`python -m jrlhf.report RUN`."""

import sys

from jrlhf.report.page import main

sys.exit(main())
