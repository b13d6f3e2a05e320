import assert from "node:assert/strict";
import { test } from "node:test";
import { openingRun } from "../page/opening.js";

test("the run has the text, the columns and the query of the opening", () => {
  // two given characters, two new ones, so three columns of two numbers; the second of three heads
  const opening = {
    ids: [4, 5, 6, 7], given: 2, layer: 1, head: 1,
    keys: [1, 2, 3, 4, 5, 6], values: [7, 8, 9, 10, 11, 12], query: [13, 14], probabilities: [[0.25, 0.75], [0.5, 0.5]],
  };
  const run = openingRun({ opening, head_size: 2, n_head: 3, block_size: 8 });
  assert.deepEqual([run.request.ids, run.request.steps], [[4, 5], 6]);
  assert.deepEqual(run.on.map(({ id }) => id), [6, 7]);
  assert.deepEqual(run.on[1].probabilities, [0.5, 0.5]);
  assert.equal(run.kept.length, 3);
  assert.deepEqual([...run.kept.lane(1, 0, 1)], [1, 2, 3, 4, 5, 6]);
  assert.deepEqual([...run.kept.lane(1, 1, 1)], [7, 8, 9, 10, 11, 12]);
  assert.deepEqual([...run.queries[1].subarray(2, 4)], [13, 14]);
});
