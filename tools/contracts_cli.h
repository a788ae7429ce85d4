/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LG_TOOLS_CONTRACTS_CLI_H
#define LG_TOOLS_CONTRACTS_CLI_H

/* As contracts.h, for the sources of the command line: what reports something
 * returns an exit status, and never the -1 that means "go on". */

#include <stdlib.h>

#include "report.h"

#define CLI__REPORTS(call)       \
    __extension__({              \
        int cli__exit_ = (call); \
        if (cli__exit_ < 0) {    \
            abort();             \
        }                        \
        cli__exit_;              \
    })

#ifndef LG__IN_report
#define report_trouble(...) CLI__REPORTS(report_trouble(__VA_ARGS__))
#define report_as(...) CLI__REPORTS(report_as(__VA_ARGS__))
#define report_error(...) CLI__REPORTS(report_error(__VA_ARGS__))
#endif

#endif
