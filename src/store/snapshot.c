/* SPDX-License-Identifier: Apache-2.0 */
#include "store/snapshot.h"

#include <string.h>

void lg__snapshot_add(lg__buf *names, const char *name, lg_node_type type, uint64_t bytes)
{
    uint32_t t = (uint32_t)type;
    lg__buf_add(names, &t, sizeof t);
    lg__buf_add(names, &bytes, sizeof bytes);
    lg__buf_add(names, name, strlen(name) + 1);
}

lg_status lg__snapshot_visit(lg__buf *names, int (*fn)(const lg_node *node, void *arg), void *arg, lg_error *err)
{
    lg_status st = lg__buf_check(names, "list of names", err);
    for (size_t at = 0; st == LG_OK && at < names->len;) {
        uint32_t type;
        lg_node node;
        memcpy(&type, names->data + at, sizeof type);
        memcpy(&node.bytes, names->data + at + sizeof type, sizeof node.bytes);
        node.type = (lg_node_type)type;
        node.name = names->data + at + sizeof type + sizeof node.bytes;
        at += sizeof type + sizeof node.bytes + strlen(node.name) + 1;
        if (fn(&node, arg) != 0) {
            break;
        }
    }
    lg__buf_free(names);
    return st;
}
