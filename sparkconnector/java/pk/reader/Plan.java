// The plan of one partition: what Python decided, as JSON (sparkconnector/plan.py writes it).
//
// A plan is a list of sections, which are read one after the other.  A section is a range of one
// partition of a topic: `cold` (files of the table), `hot` (a fetch from the leader), or `python`.
//
// Local invariant
//   P1  A plan of another version, or made for another build of this jar, is no plan.
package pk.reader;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.util.ArrayList;
import java.util.List;

final class Plan {
  static final int VERSION = 1;
  private static final ObjectMapper JSON = new ObjectMapper();

  final List<Section> sections = new ArrayList<>();

  /** One range of one partition. */
  static final class Section {
    final String kind;
    final String topic;
    final int partition;
    final long start;
    final long end;
    final JsonNode details;

    Section(JsonNode found) {
      kind = found.path("kind").asText();
      topic = found.path("topic").asText();
      partition = found.path("partition").asInt();
      start = found.path("start").asLong();
      end = found.path("end").asLong();
      details = found;
    }
  }

  private Plan(JsonNode found) {
    for (JsonNode each : found.path("sections")) {
      sections.add(new Section(each));
    }
  }

  /** Returns whether this jar can follow the plan (P1). */
  static boolean isUsable(String json) {
    JsonNode found;
    try {
      found = JSON.readTree(json);
    } catch (Exception cause) {
      return false;
    }
    if (found.path("v").asInt() != VERSION || found.path("sections").isEmpty()) {
      return false;
    }
    String build = found.path("build").asText();
    if (!build.equals(Switch.BUILD)) {
      Switch.warnOnce(
          "its jar is of build " + Switch.BUILD + ", the Python package expects " + build
              + " (pk jars prints the right one)");
      return false;
    }
    return true;
  }

  /** Parses a plan that `isUsable` accepted. */
  static Plan parse(String json) {
    try {
      return new Plan(JSON.readTree(json));
    } catch (Exception cause) {
      throw new IllegalArgumentException("not a plan", cause);
    }
  }
}
